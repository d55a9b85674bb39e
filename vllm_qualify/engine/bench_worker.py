"""`vllm bench serve` in a process that stays: it imports once, and then runs one command after another.

It runs in the engine's own Python, which has nothing of this project, so it uses only the standard library and vLLM. Orders are
files in its letter box, a folder: `NAME.order` has the arguments that follow `vllm bench serve`. After a command's output it
prints one line: MARK, the order's name, the resources that the process used, and the share of the command's random prompts that
were drawn before. As soon as a command fails, it ends with an exit code other than 0.

`NAME.ahead` has the arguments of several later commands. While it has no order, it makes their prompts, in this order. The next
such file replaces the list, even if it has no commands. When it has read the file, it prints MARK and NAME.

After a command whose result has the replies' texts, it counts the tokens of each, with the command's own tokenizer, into a file
beside the result. The clock of the command, and the samples of its client, have ended by then.

With `--metadata turns=N` the requests are chats of N turns: the next turn is sent when the reply has come, and has it. Bench
sends and times each request as ever; only the messages in it are put together here (`_Turns`).

Its requests have the `User-Agent` that is its second argument, and ids of which none is bench's own kind.

Its further arguments are the starter's time, as `watch.steady_clock_arguments` gives it: the samples of both can then be
compared, even if the machine's clock is set meanwhile.
"""

import asyncio
import dis
import hashlib
import json
import os
import random
import resource
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

MARK = "worker: done"
# A load of a quarter of a second must be seen for most of it: quick machines end small ones so soon.
POLL_S, SAMPLE_EVERY_S = 0.02, 0.05
HASH_SEED = "PYTHONHASHSEED"
TURNS = "turns="
# Prompts that are made ahead are kept in memory: about 100 MB of text.
MOST_AHEAD_TOK = 20_000_000
# Two of bench's random prompts that begin with the same so many characters are runs of the same tokens.
TELLING_CHARS = 64


def main(letter_box: Path, agent: str, offset_s: float) -> None:
    letter_box.mkdir(parents=True, exist_ok=True)
    from vllm.benchmarks.serve import add_cli_args
    from vllm.benchmarks.serve import main as bench
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = FlexibleArgumentParser()
    add_cli_args(parser)
    prompts = _Prompts()

    send_agent(agent)

    def run(arguments: list[str]) -> None:
        options = parser.parse_args(arguments)
        if hasattr(options, "request_id_prefix"):
            # Bench's own begins with `bench-`.
            options.request_id_prefix = f"{uuid.uuid4().hex}-"
        bench(options)

    taken: set[Path] = set()
    _print_line("worker: ready")
    while True:
        for path in _new_files(letter_box, "*.ahead", taken):
            prompts.planned = json.loads(path.read_text())
            _print_line(f"\n{MARK} {path.stem} {{}}")
        for path in _new_files(letter_box, "*.order", taken):
            arguments, watch = json.loads(path.read_text()), Watch(offset_s)
            prompts.begin(arguments)
            run(arguments)
            used = watch.stop()
            count_texts(arguments, prompts.tokenizer)
            _print_line(f"\n{MARK} {path.stem} {json.dumps(used | {'drawn_before': prompts.drawn_before})}")
        if arguments := prompts.next():
            prompts.make(arguments, run)
        else:
            # Orders are files, since a command in a container has no standard input.
            time.sleep(POLL_S)


def send_agent(agent: str) -> None:
    """Let bench's requests have this `User-Agent`: aiohttp's own says that this is no client of a user."""
    requests: Any = sys.modules.get("aiohttp.client_reqrep")
    if hasattr(requests, "SERVER_SOFTWARE"):
        requests.SERVER_SOFTWARE = agent


def count_texts(arguments: list[str], tokenizer: Any) -> None:
    """Write how many tokens the text of each reply of a saved result has, as it is, and the hash of these texts."""
    if "--save-detailed" not in arguments:
        return
    folder, name = (arguments[arguments.index(option) + 1] for option in ("--result-dir", "--result-filename"))
    texts = json.loads(Path(folder, name).read_text()).get("generated_texts", [])
    counted: dict[str, object] = {"texts_sha256": hashlib.sha256(json.dumps(texts).encode()).hexdigest()}
    try:
        # Half of a pair of UTF-16 is no text to a tokenizer.
        whole = [text.encode(errors="replace").decode() for text in texts]
        counted["tokens"] = [len(tokenizer(text, add_special_tokens=False).input_ids) for text in whole]
    except Exception as error:  # A tokenizer may raise anything. The reason is evidence, and the parser says it.
        counted["why_not"] = f"{type(error).__name__}: {error}"[:200]
    Path(folder, tokens_name(name)).write_text(json.dumps(counted))


def tokens_name(result: str) -> str:
    """The name of the file with the tokens of a result's texts."""
    return f"tokens-{result.removeprefix('bench-')}"


def _new_files(letter_box: Path, names: str, taken: set[Path]) -> Iterator[Path]:
    """The files that were not taken before, in the order of their names.

    They stay: Docker Engine sets the owner and the time of a file after it has appeared, and fails where it is gone by then.
    """
    for path in sorted(set(letter_box.glob(names)) - taken):
        taken.add(path)
        yield path


def _print_line(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


class _MadeError(BaseException):
    """A command has made its prompts, and goes no further."""


class _Prompts:
    """The prompts of commands. Those of planned commands are made ahead; those of other commands when they run.

    The command itself makes them, and is stopped before its first request. Its arguments determine them fully. Making them
    also changes the global random numbers and the parsed options: these changes are restored with the prompts.
    """

    def __init__(self) -> None:
        self.planned: list[list[str]] = []
        self._made: dict[str, tuple[list[Any], list[Any], dict[str, Any]]] = {}
        self._running, self._is_ahead = "", False
        # Of the last command, the share of its random prompts that begin as one drawn before, and all beginnings so far.
        self.drawn_before = 0.0
        # That of the last command; this version may take it from elsewhere.
        self.tokenizer: Any = None
        self._drawn: set[tuple[str, str]] = set()
        # What a command with turns has replaced, until the next one.
        self._functions: dict[str, Any] = {}
        serve: Any = sys.modules["vllm.benchmarks.serve"]
        self._can = _asks_for(serve, "get_samples")
        if self._can:
            self._by_vllm, serve.get_samples = serve.get_samples, self._give_prompts
        else:
            _print_line("worker: this version makes its prompts elsewhere, so that none are made ahead")
        if _asks_for(serve, "get_tokenizer"):
            # Loading a large tokenizer again for each command takes a second.
            self._tokenizer_of = lru_cache(maxsize=1)(serve.get_tokenizer)
            serve.get_tokenizer = self._get_tokenizer

    def _get_tokenizer(self, *names: Any, **options: Any) -> Any:
        """Replaces vLLM's function, from which a command gets its tokenizer."""
        self.tokenizer = self._tokenizer_of(*names, **options)
        return self.tokenizer

    def begin(self, arguments: list[str], *, is_ahead: bool = False) -> None:
        """Note the arguments of the command that runs next."""
        self._running, self._is_ahead = json.dumps(arguments), is_ahead

    def next(self) -> list[str]:
        """The arguments of the command whose prompts to make now; empty if there is none."""
        kept_tok = sum(sample.prompt_len for samples, _, _ in self._made.values() for sample in samples)
        return self.planned.pop(0) if self._can and self.planned and kept_tok < MOST_AHEAD_TOK else []

    def make(self, arguments: list[str], run: Callable[[list[str]], None]) -> None:
        """Run a command until it has made its prompts, and keep them."""
        self.begin(arguments, is_ahead=True)
        try:
            run(arguments)
        except _MadeError:
            _print_line("worker: prompts made ahead")

    def _give_prompts(self, args: Any, *others: Any, **named: Any) -> Any:
        """Replaces vLLM's `get_samples`, from which a command gets its prompts."""
        if self._running in self._made and not self._is_ahead:
            samples, states, options = self._made.pop(self._running)
            vars(args).update(options)
            for (_, put_back), state in zip(_random_numbers(), states, strict=True):
                put_back(state)
            _print_line("worker: with prompts made ahead")
        else:
            samples = self._by_vllm(args, *others, **named)
        if self._is_ahead:
            self._made[self._running] = (samples, [state() for state, _ in _random_numbers()], dict(vars(args)))
            raise _MadeError
        self._count_drawn(args, samples)
        return self._asked_in_turns(args, samples)

    def _count_drawn(self, args: Any, samples: list[Any]) -> None:
        """Count the random prompts that were drawn before: bench takes runs of consecutive tokens, and a vocabulary has few."""
        self.drawn_before = 0.0
        if getattr(args, "dataset_name", None) != "random" or len(samples) < 2:
            return
        shared = _common_beginning([sample.prompt for sample in samples])
        again = 0
        for sample in samples:
            begins = (shared, sample.prompt[len(shared) :][:TELLING_CHARS])
            again += begins in self._drawn
            self._drawn.add(begins)
        self.drawn_before = again / len(samples)

    def _asked_in_turns(self, args: Any, samples: list[Any]) -> list[Any]:
        """Have bench send the samples as turns of chats, if its options say so."""
        given = getattr(args, "metadata", None) or []
        turns = next((int(each.removeprefix(TURNS)) for each in given if each.startswith(TURNS)), 1)
        functions: Any = getattr(sys.modules["vllm.benchmarks.serve"], "ASYNC_REQUEST_FUNCS", {})
        functions.update(self._functions)
        if turns > 1:
            self._functions = {args.backend: functions[args.backend]}
            functions[args.backend] = _Turns(samples, turns, functions[args.backend])
        return samples


class _Turns:
    """Replaces a function of vLLM that sends a request. A request's messages are those of its chat so far, replies among them.

    Requests come in rounds: first the first turn of every chat, then the second. So a chat's next turn waits for the chats
    beside it, as for a person who reads. What all prompts begin with is the system's message.
    """

    def __init__(self, samples: list[Any], turns: int, ask: Callable[..., Any]) -> None:
        self._chats, self._ask = len(samples) // turns, ask
        self._system = _common_beginning([sample.prompt for sample in samples])
        self._numbers = {sample.request_id: number for number, sample in enumerate(samples)}
        self._said = [[{"role": "system", "content": self._system}] if self._system else [] for _ in range(self._chats)]
        self._answered = [asyncio.Event() for _ in samples]

    async def __call__(self, request_func_input: Any, session: Any, pbar: Any = None) -> Any:
        number = self._numbers[request_func_input.request_id]
        before, said = number - self._chats, self._said[number % self._chats]
        if before >= 0:
            await self._answered[before].wait()
        said.append({"role": "user", "content": request_func_input.prompt[len(self._system) :]})
        # It replaces the messages that are made of the prompt.
        request_func_input.extra_body = {**(request_func_input.extra_body or {}), "messages": list(said)}
        output = await self._ask(request_func_input=request_func_input, session=session, pbar=pbar)
        said.append({"role": "assistant", "content": output.generated_text})
        self._answered[number].set()
        return output


def _common_beginning(texts: list[str]) -> str:
    first, last = min(texts), max(texts)
    return first[: next((at for at, (one, other) in enumerate(zip(first, last, strict=False)) if one != other), len(first))]


def _asks_for(serve: Any, name: str) -> bool:
    """Whether a command looks this name up in its own module, where it can be replaced."""
    runs = [getattr(serve, each, None) for each in ("main", "main_async")]
    steps = [step for each in runs if each for step in dis.get_instructions(each)]
    return hasattr(serve, name) and any(step.opname == "LOAD_GLOBAL" and step.argval == name for step in steps)


def _random_numbers() -> list[tuple[Callable[[], Any], Callable[[Any], None]]]:
    """Functions that get and set the state of the global random numbers: Python's, and numpy's if it is loaded."""
    numpy: Any = sys.modules.get("numpy")
    ours = (random.getstate, random.setstate)
    return [ours, (numpy.random.get_state, numpy.random.set_state)] if numpy else [ours]


class Watch:
    """Samples the CPU seconds of the thread that sends requests: a client that is always busy measures only itself."""

    def __init__(self, offset_s: float) -> None:
        self._offset_s = offset_s
        self.samples: list[tuple[float, float]] = []
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._sample_until_over, daemon=True)
        self._thread.start()

    def _sample_until_over(self) -> None:
        while not self._over.wait(SAMPLE_EVERY_S):
            self.samples.append(self._take_sample())

    def _take_sample(self) -> tuple[float, float]:
        """CPU seconds of the main thread, which sends the requests (fields 14 and 15 of its stat, in clock ticks)."""
        fields = Path(f"/proc/self/task/{os.getpid()}/stat").read_text().rpartition(")")[2].split()
        used_s = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
        return round(self._offset_s + time.monotonic(), 3), used_s

    def stop(self) -> dict[str, object]:
        """Stop sampling. A sample is a pair: the time in s since 1970, and the CPU seconds used by then."""
        self._over.set()
        self._thread.join()
        # A command may be shorter than the time between two samples.
        self.samples.append(self._take_sample())
        most_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return {"cpu_s": self.samples, "max_rss_mib": most_kib // 1024}


def offset_from(offset_s: str, boot_id: str) -> float:
    """How far unix time is ahead of the monotonic clock, in s: as given, or by its own clock if this is another machine."""
    own = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return float(offset_s) if boot_id == own else time.time() - time.monotonic()


if __name__ == "__main__":
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    if os.environ.get(HASH_SEED) != "0":
        # Bench makes a trace's prompts by `hash`, which Python seeds when it starts.
        os.environ[HASH_SEED] = "0"
        os.execv(sys.executable, sys.orig_argv)  # noqa: S606  (no shell is wanted)
    main(Path(sys.argv[1]), sys.argv[2], offset_from(*sys.argv[3:]))
