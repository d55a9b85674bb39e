"""What a line says, without how it was written: colours, the words of another process around an exception, parts. Pure."""

import re

# Colours, also as rsyslog, JSON and `cat -v` write them, or with the first character lost; and the return before a line's end.
_COLOURS = re.compile(
    r"(?:[\x1b\ufffd\u241b]|#033|\\x1b|\\u001b|\\033|\^\[)\[[0-9;?]{0,20}[A-Za-z]|\[[0-9;]{1,12}m|(?:#015|\^M)$"
)
# What one process says of another one's exception: the words inside count.
_WRAPPED = re.compile(
    r"^(?P<outer>(?:[\w.]{1,200}: )?)(?:(?:Call to \S{1,60} (?:method )?failed|Error in calling method \S{1,60}"
    r"|Exception in worker \S{1,60} while processing method \S{1,60}): (?P<called>.+?)(?:, Traceback \(most recent|$)"
    r"|Worker failed with error ['\"](?P<worker>.+)['\"], please check the stack trace)"
)
_WRAPPERS = (" failed", " while processing method ", "Error in calling ")
_INNER_CLASS = re.compile(r"[\w.]{1,200}(?:Error|Exception)(?::|$)")
# An exception as Python's `repr` writes it.
_WRITTEN = re.compile(r"^(?P<name>[\w.]{1,200}(?:Error|Exception))\((?P<quote>['\"])(?P<words>.+)(?P=quote),?\)$")
# An exception with several texts is printed as a tuple.
_PARTS = re.compile(r"^(?P<outer>[\w.]{1,200}: )\((?P<parts>(?:['\"].*['\"], ){1,20}['\"].*['\"])\)$")
_BETWEEN_PARTS = re.compile(r"['\"], ['\"]")


def remove_colours(line: str) -> str:
    return _COLOURS.sub("", line)


def read_inner_exception(said: str) -> str:
    """The exception that another process reports, or that is written in another way."""
    if any(word in said for word in _WRAPPERS) and (wrapped := _WRAPPED.match(said)):
        inner = wrapped["called"] or wrapped["worker"]
        said = inner if _INNER_CLASS.match(inner) else f"{wrapped['outer']}{inner}"
    if not said.endswith(")"):
        return said
    if written := _WRITTEN.match(said):
        said = f"{written['name']}: {written['words']}"
    if parts := _PARTS.match(said):
        said = parts["outer"] + _BETWEEN_PARTS.sub("", parts["parts"][1:-1])
    return said
