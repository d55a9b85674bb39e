"""Why a server ended or never answered, and who must act: from its log and the way it ended. Pure.

A log has one cause and many consequences: whatever happened, vLLM's last words are "Engine core initialization failed". So the
earliest known sign in the log wins, or the earliest exception with a message of vLLM's, or with one of its packages' that tells
who must act. Only lines that say what happened count: no notes, no warnings, no source lines of a traceback, and nothing that
the server survived. If the log has neither, the signs that many causes share are looked for, and where a package's own code
failed, which often wraps a cause; then an exception's place and class; then the way the server ended.
"""

import re
from collections.abc import Collection
from itertools import chain, islice, takewhile
from signal import Signals
from typing import cast

from pydantic import Field

from vllm_qualify.engine.failure.end import End
from vllm_qualify.engine.failure.families import NOT_OF_A_START
from vllm_qualify.engine.failure.lines import EXCEPTION, LONGEST_READ, remove_quotation, telling_text, without_prefixes
from vllm_qualify.engine.failure.meanings import IN_AN_IMAGE, MEANINGS, FailureClass, Meaning, Turn
from vllm_qualify.engine.failure.messages import Message, find_fate, find_message, find_numbered
from vllm_qualify.engine.failure.raised import find_raised
from vllm_qualify.engine.failure.signs import GENERAL_SIGNS, LAST_SIGNS, SIGNS, SIGNS_OF_CLASSES
from vllm_qualify.engine.failure.signs.sign import Sign
from vllm_qualify.engine.failure.wrapped import remove_colours
from vllm_qualify.recipe.values import Frozen

MOST_LINES = 6
REFUSALS: tuple[FailureClass, ...] = ("refused-configuration", "invalid-value")
READY = "Application startup complete"


class Failure(Frozen):
    """What went wrong, who must act, and the remedy."""

    kind: FailureClass
    whose_turn: Turn
    retry: bool = Field(description="whether the same thing, tried again, would plausibly succeed")
    problem: str
    remedy: str
    lines: list[str] = Field(description="the lines of the log that tell it, the most telling first; empty for an empty log")


# A process of the server ended without a reason in the log: only its parent reports it.
_SILENT_DEATHS = [
    re.compile(r"(?:Engine core|Worker) proc (?P<name>\S+) died unexpectedly(?: \(exit code: (?P<code>-?\d+)\))?"),
    re.compile(r"Worker (?P<name>\S{1,60}(?: pid \d+)?) died, exit code: (?P<code>-\d+)"),
    # Ray says it in a warning.
    re.compile(r"A (?P<name>worker) died or was killed while executing a task by an unexpected system error(?P<code>)"),
    re.compile(r"MPClient: (?P<name>engine core) exited unexpectedly(?P<code>)"),
    re.compile(r"Failed core proc\(s\): \{'(?P<name>[^']+)': (?P<code>-\d+)"),
]
_STOP_REQUESTED = re.compile(r"\[shutdown\] API server: shutdown triggered")
_RAY_WAIT = re.compile(r"Waiting for creating a placement group of specs for (?P<seconds>\d+) seconds")
_HUB_WAIT = re.compile(r"^Rate limited\. Waiting (?P<seconds>[\d.]+)s before retry")

# The exit codes of shells, of Docker and of its like.
_REFUSED_PROGRAMS: dict[int, tuple[FailureClass, str]] = {
    126: ("no-permission", "its program may not be run"),
    127: ("broken-installation", "its program is not there"),
}
_CRASHES = {Signals.SIGSEGV, Signals.SIGABRT, Signals.SIGBUS, Signals.SIGILL, Signals.SIGFPE}

_OF_A_REQUEST = re.compile(r"ValidationError: \d+ validation errors? for \w{0,60}Request\b")
_REFUSAL = re.compile(r"^ *(?:Value error|Assertion failed), ")
_NUMBERED = re.compile(
    r"(?:(?:CUDA|HIP|cuda)(?: driver| runtime)? [Ee]rror(?: \d+| \(\d+\))? ?|C(?:uda|UDA) failure(?: \d+)?"
    r"|Triton Error \[\w{1,10}\]|Error \d{3})"
    r"(?:: | )'?(?P<text>[^\n'(.,]{4,160}?)(?= at /|[\n'(.,]|$)"
    r"|\b(?:cuda|hip)Error(?P<name>[A-Z]\w{1,60})"
)
_CONSEQUENCE = re.compile(
    r"Engine core initialization failed|Engine process failed to start|Frontend process failed|WorkerProc initialization failed"
    r"|EngineCore encountered an issue|EngineDeadError|Worker failed with error|ProcessRaisedException"
    # An interpreter ended while its threads were still reading.
    r"|at interpreter shutdown, possibly due to daemon threads"
    r"|CancelledError|KeyboardInterrupt|SystemExit|BrokenPipeError|ConnectionResetError"
)
# An exception whose message begins on the next line.
_WITHOUT_MESSAGE = re.compile(r"[\w.]{0,200}(?:Error|Exception):$")
_CLASS = re.compile(r"^(?:[\w.]{1,200}: )+")
_AFTER_REFUSAL = re.compile(r"^(?:Value error|Assertion failed), | \[type=.*$")
_LONGEST_LINE = 1000
_MOST_CAUSES = 500
_MOST_MATCHES = 50
_MOST_FRAME_LINES = 400
_MESSAGE_WITHIN, _LONGEST_QUOTE = 4, 300


def classify_log(log: str, end: End, *, in_image: bool = False) -> Failure:
    """The failure that a server's log and end show; an empty log is classified by the end alone.

    The log is taken as it is: a caller that must not echo secrets redacts it first. At most 2000 characters of a line are
    read. Lines are returned without colours, and are cut after 1000 characters. With `in_image` the server ran from an image:
    what is broken in it is its owner's, not the host's.
    """
    # Without control characters. Each state of a progress bar is a line.
    lines = remove_quotation([remove_colours(line).rstrip() for line in re.split(r"\r\n|\n|\r", log)])
    # Nothing before the end of the server's start stopped it.
    alive = max((index + 1 for index, line in enumerate(lines) if READY in line), default=0)
    telling = [""] * alive + [telling_text(line) for line in lines[alive:]]
    # The first line of each message that is not on its exception's own line tells, too.
    for index, line in enumerate(list(telling)):
        if _WITHOUT_MESSAGE.match(line) and (place := _find_message(lines, index)) is not None:
            telling[place] = without_prefixes(lines[place])[0].strip()
    for index in _find_requests_errors(telling) if alive else []:
        telling[index] = ""
    failure = _classify_by_words(lines, telling, is_after_start=alive > 0, in_image=in_image)
    # If the memory limit killed a rank, the others fail with an NCCL error. Any other sign wins over the memory limit: the
    # runtime also reports the end of a helper process, which the server may have survived.
    if end.oom_killed and (failure is None or failure.kind == "nccl-failure"):
        how = f"; the server ended by {_signal_name(end.signal)}" if end.signal else ""
        return _make_failure("out-of-memory", f"the memory limit killed a process of the server{how}", _last_lines(lines))
    failure = failure or _classify_silent_death(lines, telling, alive)
    failure = failure or _classify_by_last_words(lines, telling, end, in_image=in_image)
    return failure or _classify_by_end(lines, telling, end, in_image=in_image)


def _classify_by_last_words(lines: list[str], telling: list[str], end: End, *, in_image: bool) -> Failure | None:
    """By words that a healthy start may have; or, if the server ended itself, by an exception's place or class."""
    if last := _find_sign(LAST_SIGNS, lines, telling):
        return _fail_by_sign(lines, telling, *last)
    if not end.exit_code or end.signal is not None:
        return None
    named = (index for index, line in enumerate(telling) if _is_cause(line))
    causes = {index for index in islice(named, _MOST_CAUSES) if find_fate(telling[index]) not in NOT_OF_A_START}
    raised = find_raised(lines, telling, sorted(causes))
    if raised is None or raised[1].family.fate == "engine-bug":
        only = [line if index in causes else "" for index, line in enumerate(telling)]
        if last := _find_sign(SIGNS_OF_CLASSES, lines, only):
            return _fail_by_sign(lines, only, *last)
    return _fail_by_message(lines, telling, *raised, in_image=in_image) if raised else None


def _find_message(lines: list[str], index: int) -> int | None:
    """Where the message of the exception at `index` begins: it may be indented like a traceback's source lines."""
    following = range(index + 1, min(index + 1 + _MESSAGE_WITHIN, len(lines)))
    return next((place for place in following if without_prefixes(lines[place])[0].strip()), None)


def _find_requests_errors(telling: list[str]) -> list[int]:
    """The lines with an exception of one request, which a server survives."""
    named = islice((index for index, line in enumerate(telling) if EXCEPTION.match(line)), _MOST_CAUSES)
    return [index for index in named if _OF_A_REQUEST.search(telling[index]) or find_fate(telling[index]) == "request"]


def _classify_by_words(lines: list[str], telling: list[str], *, is_after_start: bool, in_image: bool) -> Failure | None:
    """By the earliest sign, numbered error of a GPU, or message; where several are in one line, by the first of these.

    Once a server serves, no refusal ends it: what it refuses then are requests.
    """
    refusals = REFUSALS if is_after_start else ()
    signed = _find_sign(SIGNS, lines, telling)
    before = telling if signed is None else telling[: signed[0]]
    said, wrapping = _find_messages(before, refusals)
    found = [each for each in (_find_numbered_error(before), said) if each]
    if found:
        return _fail_by_message(lines, telling, *min(found, key=lambda each: each[0]), in_image=in_image)
    general = [sign for sign in GENERAL_SIGNS if sign.kind not in refusals]
    signed = signed or _find_sign(general, lines, telling)
    if signed is None and wrapping:
        return _fail_by_message(lines, telling, *wrapping, in_image=in_image)
    return _fail_by_sign(lines, telling, *signed, in_image=in_image) if signed else None


def _find_sign(signs: list[Sign], lines: list[str], telling: list[str]) -> tuple[int, Sign, re.Match[str]] | None:
    """The earliest sign, and of several in one line the first in the list; the place of its line."""
    text = "\n".join(telling)
    found = [(order, place) for order, sign in enumerate(signs) if (place := _find_match(sign, lines, text))]
    if not found:
        return None
    order, (first, match) = min(found, key=lambda each: (each[1][0], each[0]))
    return first, signs[order], match


def _find_match(sign: Sign, lines: list[str], text: str) -> tuple[int, re.Match[str]] | None:
    """The sign's first match that ends a traceback with its frame, and the place of its line."""
    if sign.needs and not any(words in text for words in sign.needs):
        return None
    most = 1 if sign.through is None else _MOST_MATCHES
    for match in islice(sign.pattern.finditer(text), most):
        first = text.count("\n", 0, match.start())
        if _passes_through(sign.through, lines, first):
            return first, match
    return None


def _fail_by_sign(
    lines: list[str], telling: list[str], first: int, sign: Sign, match: re.Match[str], *, in_image: bool = False
) -> Failure:
    groups = match.groupdict(default="")
    groups |= {"whole": match[0].strip()}
    remedy = sign.remedy and sign.remedy.format_map(groups)
    head = match.string.count("\n", 0, match.start("telling")) if "telling" in groups else first
    others = range(first, first + match[0].count("\n") + 1)
    shown = [head, *(index for index in others if index != head and telling[index])]
    meaning = _find_meaning(sign.kind, in_image=in_image and sign.of_image)
    meaning = Meaning(sign.turn or meaning.turn, meaning.retry if sign.retry is None else sign.retry, remedy or meaning.remedy)
    return _make_failure(sign.kind, sign.problem.format_map(groups), [lines[index] for index in shown], meaning)


def _find_numbered_error(telling: list[str]) -> tuple[int, Message] | None:
    """The earliest error of CUDA or HIP that is not of the release's own making, and the place of its line."""
    text = "\n".join(telling)
    for match in islice(_NUMBERED.finditer(text), _MOST_MATCHES):
        message = find_numbered(match["text"] or match["name"])
        if message:
            return text.count("\n", 0, match.start()), message
    return None


def _find_messages(telling: list[str], refusals: Collection[str]) -> tuple[tuple[int, Message] | None, ...]:
    """The earliest exceptions with a known message that ends a server: one that tells the cause, one that may wrap a cause.

    Each is the place of its line, and the message.
    """
    causes = (index for index, line in enumerate(telling) if EXCEPTION.match(line) or _REFUSAL.match(line))
    wrapping = None
    for index in islice(causes, _MOST_CAUSES):
        message = find_message(telling[index])
        fate = message.family.fate if message else ""
        # What a check of the configuration refuses is no failure of the code's own, whichever message has the same words.
        is_other = fate == "engine-bug" and _REFUSAL.match(telling[index])
        if message is None or fate in (*NOT_OF_A_START, *refusals) or is_other:
            continue
        if fate != "engine-bug" or message.is_of_engine:
            return (index, message), wrapping
        wrapping = wrapping or (index, message)
    return None, wrapping


def _fail_by_message(lines: list[str], telling: list[str], place: int, message: Message, *, in_image: bool) -> Failure:
    said = _CLASS.sub("", _AFTER_REFUSAL.sub("", telling[place].strip()))
    kind, remedy = cast(FailureClass, message.family.fate), message.family.remedy
    meaning = _find_meaning(kind, in_image=in_image)
    meaning = meaning._replace(remedy=remedy or meaning.remedy)
    return _make_failure(kind, f"{message.speaker}: {_shorten(said)}", [lines[place]], meaning)


def _passes_through(frame: re.Pattern[str] | None, lines: list[str], last: int) -> bool:
    """Whether the traceback that ends in this line has such a frame."""
    if frame is None:
        return True
    frames = takewhile(lambda line: "Traceback (most recent call last)" not in line, reversed(lines[:last]))
    return any(frame.search(line[:LONGEST_READ]) for line in islice(frames, _MOST_FRAME_LINES))


def _classify_silent_death(lines: list[str], telling: list[str], alive: int) -> Failure | None:
    """A process's end is the cause only if no exception comes before it. Its parent may report it in a warning."""
    for line, text in zip(lines[alive:], telling[alive:], strict=True):
        if _is_cause(text):
            return None
        death = next((match for pattern in _SILENT_DEATHS if (match := pattern.search(line))), None)
        code = int(death["code"] or 0) if death else 0
        if death and (code < 0 or not death["code"]):
            how = f"was ended by {_signal_name(-code)}" if code else "ended without telling why"
            return _make_failure(_signal_kind(-code), f"the server's process {death['name']} {how}", [line])
    return None


def _classify_by_end(lines: list[str], telling: list[str], end: End, *, in_image: bool) -> Failure:
    if end.exit_code is None:
        return _classify_given_up(lines, telling, end)
    if end.signal is not None:
        problem = f"the server was ended by {_signal_name(end.signal)}"
        return _make_failure(_signal_kind(end.signal), problem, _last_lines(lines))
    # vLLM ends with exit code 0 after a SIGTERM.
    stopped = [line for line in lines if _STOP_REQUESTED.search(line)]
    if stopped:
        problem = f"the server was stopped from outside, and ended with exit code {end.exit_code}"
        return _make_failure("killed", problem, stopped)
    exceptions = _find_exceptions(lines, telling)
    if end.exit_code in _REFUSED_PROGRAMS and not exceptions:
        kind, why = _REFUSED_PROGRAMS[end.exit_code]
        problem = f"the server ended with exit code {end.exit_code}: {why}"
        return _make_failure(kind, problem, _last_lines(lines), _find_meaning(kind, in_image=in_image))
    said = f": {_shorten(next(iter(exceptions)))}" if exceptions else "" if _last_lines(lines) else " and left no log"
    problem = f"the server ended with exit code {end.exit_code}{said}"
    return _make_failure("unknown", problem, [*chain(*exceptions.values())] or _last_lines(lines))


def _classify_given_up(lines: list[str], telling: list[str], end: End) -> Failure:
    last = _last_lines(lines)
    wait = _HUB_WAIT.match(last[0]) if last else None
    if wait:
        return _make_failure("hub-rate-limit", f"the server waits {wait['seconds']} s for the hub's rate limit (429)", last)
    ray = next((match for line in last if (match := _RAY_WAIT.search(line))), None)
    if ray:
        return _make_failure(
            "too-few-gpus", f"Ray waited {ray['seconds']} s for GPUs: the cluster has too few that are free", last
        )
    waited = end.waited_s is not None
    interrupted = [line for line in lines if without_prefixes(line)[0] == "KeyboardInterrupt"]
    if interrupted and not waited:
        return _make_failure("killed", "somebody interrupted the server (Ctrl-C, SIGINT)", interrupted)
    what = f"no completion came back within {end.waited_s:g} s" if waited else "the server does not answer any more"
    said = f"; the log's last line: {_shorten(last[0])}" if last else "; it left no log"
    return _make_failure("hung", what + said, [*chain(*_find_exceptions(lines, telling).values()), *last])


def _find_exceptions(lines: list[str], telling: list[str]) -> dict[str, list[str]]:
    """What each exception says, and its lines in the log, the last exception first; a consequence only if there is no cause."""
    named = [index for index, line in enumerate(telling) if EXCEPTION.match(line)]
    raised = {}
    causes = [index for index in named if _is_cause(telling[index]) and not _CONSEQUENCE.search(lines[index])]
    for index in causes or named:
        message = _find_message(lines, index) if _WITHOUT_MESSAGE.match(telling[index]) else None
        places = [index] if message is None else [index, message]
        raised[" ".join(telling[place] for place in places)] = [lines[place] for place in places]
    return dict(reversed(raised.items()))


def _is_cause(line: str) -> bool:
    return bool(EXCEPTION.match(line)) and not _CONSEQUENCE.search(line)


def _last_lines(lines: list[str]) -> list[str]:
    """The last lines that are not empty, the last one first."""
    return [line for line in lines if line.strip()][:-4:-1]


def _signal_kind(signal: int) -> FailureClass:
    return "crashed" if signal in _CRASHES else "killed"


def _signal_name(signal: int) -> str:
    try:
        return f"signal {signal} ({Signals(signal).name})"
    except ValueError:
        return f"signal {signal}"


def _shorten(text: str, most_chars: int = _LONGEST_QUOTE) -> str:
    return text if len(text) <= most_chars else f"{text[:most_chars]} …"


def _find_meaning(kind: FailureClass, *, in_image: bool) -> Meaning:
    return (in_image and IN_AN_IMAGE.get(kind)) or MEANINGS[kind]


def _make_failure(kind: FailureClass, problem: str, lines: list[str], meaning: Meaning | None = None) -> Failure:
    meaning = meaning or MEANINGS[kind]
    return Failure(
        kind=kind,
        whose_turn=meaning.turn,
        retry=meaning.retry,
        problem=problem,
        remedy=meaning.remedy,
        lines=[_shorten(line, _LONGEST_LINE) for line in lines[:MOST_LINES]],
    )
