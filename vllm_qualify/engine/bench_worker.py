"""`vllm bench serve` in a process that stays: it imports once, and then runs one command after another.

It runs in the engine's own Python, which has nothing of this project, so it uses the standard library and vLLM only. Orders are
files in its letter box, a folder: `NAME.json` has the arguments that follow `vllm bench serve`. What a command printed is
followed by one line on its standard output: MARK, the order's name, and what the process used. It ends with another exit code
than 0 as soon as a command fails.
"""

import json
import os
import resource
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

MARK = "vllm-qualify: done"
POLL_S, SAMPLE_EVERY_S = 0.02, 0.2


def main(letter_box: Path) -> None:
    letter_box.mkdir(parents=True, exist_ok=True)
    parser, bench = _bench()
    _say("vllm-qualify: ready")
    while True:
        for order in sorted(letter_box.glob("*.json")):
            arguments = json.loads(order.read_text())
            order.unlink()
            watch = _Watch()
            bench(parser.parse_args(arguments))
            _say(f"\n{MARK} {order.stem} {json.dumps(watch.ended())}")
        # Files are how the two talk: a command in a container has no standard input.
        time.sleep(POLL_S)


def _say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def _bench() -> tuple[Any, Callable[[Any], object]]:
    """The parser of its options, and what runs them."""
    from vllm.benchmarks.serve import add_cli_args, main
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = FlexibleArgumentParser()
    add_cli_args(parser)
    return parser, main


class _Watch:
    """The CPU seconds of the thread that asks, again and again: a client that has no time left measures itself."""

    def __init__(self) -> None:
        self.samples: list[tuple[float, float]] = []
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)
        self._thread.start()

    def _sample(self) -> None:
        while not self._over.wait(SAMPLE_EVERY_S):
            self.samples.append((round(time.time(), 3), _used_s()))

    def ended(self) -> dict[str, object]:
        """Samples are pairs of the time in s since 1970 and the CPU seconds used by then."""
        self._over.set()
        self._thread.join()
        most_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return {"cpu_s": self.samples, "max_rss_mib": most_kib // 1024}


def _used_s() -> float:
    """By the main thread, in which bench asks (fields 14 and 15 of its stat, in clock ticks)."""
    fields = Path(f"/proc/self/task/{os.getpid()}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


if __name__ == "__main__":
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    main(Path(sys.argv[1]))
