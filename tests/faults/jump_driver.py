"""Watch a load while the machine's clock jumps: in FOLDER the samples of the machine, and what the client used.

jump_driver.py watch FOLDER CLOCK JUMP    the load; in its middle CLOCK, libfaketime's file, gets JUMP
jump_driver.py client …                   the load's client, another process, as bench's worker is one
"""

import json
import subprocess
import sys
import threading
from pathlib import Path

from vllm_qualify.engine.bench_worker import Watch, offset_from
from vllm_qualify.engine.watch import SCRAPES, steady_clock_arguments, watching_machine

HALF_S, EVERY_S = 1.5, 0.1


def watch(folder: Path, clock: Path, jump: str) -> None:
    (folder / SCRAPES).touch()
    with watching_machine(folder, {}, every_s=EVERY_S):
        command = [sys.executable, __file__, "client", *steady_clock_arguments()]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as client:
            assert client.stdout is not None
            assert client.stdout.readline() == "asks\n"
            lasts(HALF_S)
            clock.write_text(jump)
            (folder / "client-1.json").write_text(client.stdout.read())


def lasts(seconds: float) -> None:
    # libfaketime breaks `time.sleep` where only the wall clock is to be another.
    threading.Event().wait(seconds)


def client(*message: str) -> None:
    used = Watch(offset_from(*message))
    print("asks", flush=True)
    lasts(2 * HALF_S)
    print(json.dumps(used.stop()))


if __name__ == "__main__":
    if sys.argv[1] == "watch":
        watch(Path(sys.argv[2]), Path(sys.argv[3]), sys.argv[4])
    else:
        client(*sys.argv[2:])
