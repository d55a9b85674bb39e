"""What a line of a server's log says, without what its writers and collectors put around it. Pure."""

import re

from vllm_qualify.engine.failure.wrapped import read_inner_exception

LONGEST_READ = 2000

_PREFIX = re.compile(
    r"\s{0,2}\[?[\w.-]*\]?\s+\| ?"  # Compose, and its like
    r"|[\w.-]{1,80}\[(?:info|warning|error)\]\s{0,2}"  # RunPod
    r"|[a-z0-9][\w.-]{1,200} [a-z][\w-]{0,60} (?=\([\w.]{1,60} pid=)"  # Kubernetes: pod and container
    r"|\[?\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d\S*[ \t]|\[?\d\d:\d\d:\d\d(?:[.,]\d{1,9})?\]? "
    r"|(?:DEFAULT|DEBUG|INFO|WARNING|ERROR|CRITICAL) \d{4}-\d\d-\d\dT\S{1,40}Z "  # Google Cloud
    r"|\([\w.]{1,60}\([^\n]{0,100}?\) pid=\d[^()\n]{0,80}\) {0,2}"  # Ray, for a task with a function in its name
    r"|\s{0,2}\((?=[^()]{0,80}\bpid=\d)[^()]{1,160}\) {0,2}"
    r"|\[(?:Stage-|rank|default)\d+\]:? ?"
    # Another program's.
    r"|\[[A-Z][\w ]{1,30}\] (?=\(|(?:INFO|WARNING|ERROR) )"
    # Rich's, of a program that shows what its server says.
    r"|(?:\[\d\d/\d\d/\d\d \d\d:\d\d:\d\d\]| {19}) (?:INFO|ERROR) {1,8}(?=\S)"
    # Google's libraries', of errors only.
    r"|[EF]\d{4}(?:\d{4})? \d\d:\d\d:[\d.]{2,20} +\d{1,10} [\w.]{1,80}:\d{1,6}\] +"
    # Kubernetes' and the journal's.
    r"|\[pod/[^\]\s]{1,300}\] |[A-Z][a-z]{2} [ \d]\d \d\d:\d\d:\d\d \S{1,100} [^\s\[]{1,100}\[\d{1,9}\]: "
)
_LEVEL = re.compile(
    r"(?:\d{1,9} kserve )?(?P<level>DEBUG|INFO|WARNING|ERROR|CRITICAL)"
    # vLLM's; uvicorn's; Python's own with a logger's name; Ray's; KServe's.
    r"(?: \d\d-\d\d \d\d:\d\d:\d\d (?:\[[^\]]*\]|[^\s\]]+\]) ?|:\s+|:[\w.]{1,100}:|\s{1,3}[\w.]{1,60}:\d{1,5} -- "
    r"| \[[^\]]{1,200}\] (?:Failed to start model server: )?)"
)
_SURVIVED = re.compile(r"\bretrying\b|\bwill retry\b|\bfalling back\b|^Error retrieving (?:safetensors|file list)", re.I)
_QUIET_LEVELS = ("DEBUG", "INFO", "WARNING")
_QUIET = re.compile(
    r'\[[WI][\d ]|  +File "| {4}|Traceback \(most recent|The above exception was|During handling of'
    # Notes of Ray's native code, and of NCCL with NCCL_DEBUG=INFO.
    r"|[IW] \d+ \d+\] |[IW]\d{4} \d\d:\d\d:\d\d|\S{1,100} (?:\[\d+\] )?NCCL (?:INFO|TRACE) "
)

# An exception inside another program's words is indented as a whole. A source line of a traceback never begins with a class.
_INDENTED = re.compile(r" {4,60}(?=(?:[\w.]{1,200}\.)?[A-Z]\w{0,80}(?:Error|Exception): \S)")

EXCEPTION = re.compile(
    r"(?:[\w.]+\.)?[A-Z]\w*(?:Error|Exception|Exit|Interrupt)(?::|$)|Exception: |Fatal Python error: |vllm[\w ]*: error: "
    # What C++ says when nobody catches its exception.
    r"|  what\(\):  "
    # An exception with another name, such as subprocess.TimeoutExpired.
    r"|(?:[a-z_]\w{0,60}\.){1,8}[A-Z]\w{1,80}(?::|\(|$)"
)


def remove_quotation(lines: list[str]) -> list[str]:
    """The lines without the four blanks or more that all of them begin with: a log may come as Markdown quotes it."""
    common = min((len(line) - len(line.lstrip(" ")) for line in lines if line), default=0)
    return [line[common:] for line in lines] if common >= 4 else lines


def telling_text(line: str) -> str:
    """What the line says happened; empty for a note, a warning or a traceback's source line."""
    said, is_quiet = without_prefixes(line)
    said = _INDENTED.sub("", said, count=1) if said.startswith("    ") else said
    is_survived = _SURVIVED.search(said) and not EXCEPTION.match(said)
    return "" if is_quiet or _QUIET.match(said) or is_survived else read_inner_exception(said)


def without_prefixes(line: str) -> tuple[str, bool]:
    """The line without its prefixes, and whether its level is that of a note or a warning."""
    line = line[:LONGEST_READ]
    while prefix := _PREFIX.match(line):
        line = line[prefix.end() :]
    level = _LEVEL.match(line)
    return (line[level.end() :], level["level"] in _QUIET_LEVELS) if level else (line, False)
