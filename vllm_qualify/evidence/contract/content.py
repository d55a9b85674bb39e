"""What may not stand in a reply's content: markup of a template, a role, or a call of a tool.

tests/evidence/contract/markup.py has a call in the form of each of vLLM's tool-call parsers.
"""

import re
from collections.abc import Collection
from functools import cache

from vllm_qualify.evidence.contract.replies import need, shorten

# What the templates and parsers of vLLM's model families put around calls and turns: `<tool_call>`, `<|im_end|>`,
# `[TOOL_CALLS]`, `<|tool_call>`, `<function=name>`, `<pad>` and their like. DeepSeek's bars are wide ones (U+FF5C).
_MARKUP = re.compile(
    r"</?[|\uff5c][^<>\n]{1,60}>|<[^<>|\s]{1,30}\|>"
    r"|</?[\w:|]{0,20}(?:tool|function|invoke|arg_|param)[\w:|]{0,20}(?:[\s=][^<>\n]{0,80})?>"
    r"|</?(?:\w{1,10}:)?(?:pad|unk|eos|bos|s|call|assistant|user|escape|sop)>|<(?:start|end)_of_turn>"
    r"|\[/?(?:TOOL_\w{1,20}|AVAILABLE_TOOLS|ARGS|CALL_ID|INST|gMASK)\]|\]<\]\w{1,20}\[>\[",
    re.I,
)
# Some templates have nothing between the role and what is said.
_ROLE = re.compile(r"\s*(?:(?i:assistant|user|system|model)\s*[:\n]|assistant(?=[A-Z0-9]|final|analysis))")
# A block of code between fences, and code within a line: no word goes on behind its ends, as behind an apostrophe.
_CODE = re.compile(r"```.*?```|(?<!\w)`[^`\n]+`(?!\w)", re.S)
# What stands for code: it is no space and no letter, so that nothing behind it moves to the beginning of a line.
_IN_PLACE_OF_CODE = "\ufffc"
# A call as text, of a tool that was offered: only its name tells it from the JSON and the code of an ordinary answer. A call in
# Python stands alone in its line, and has arguments; the description of a tool has the schema of its parameters.
_CALL = r"""
  "(?:name|tool_name|function|tool|recipient_name)"\s{0,20}:\s{0,20}"(?:functions?\.)?(?:NAMES)"\s{0,20},\s{0,20}
    "(?:arguments|parameters|args|input|tool_input)"\s{0,20}:(?!\s{0,20}\{\s{0,20}"(?:type|properties)"\s{0,20}:)
| \{\s{0,20}"(?:NAMES)"\s{0,20}:\s{0,20}\{
| ^[ \t\[]{0,20}(?:NAMES)\((?=[^()\n]{0,500}["'=])[^()\n]{0,500}\)\s{0,20}(?:[\],;]|$)
| ^[ \t]{0,20}(?:(?:functions?|call|tool)[.:\s]{0,3}){0,2}(?:NAMES)(?::\d{1,4}|[a-zA-Z0-9]{9})?
    \s{0,20}(?:(?:```)?\s{0,3}json)?\s{0,20}\{\s{0,20}(?:["}]|\w{1,50}\s{0,3}:)
| \bto=functions\.(?:NAMES)
| call\s{1,3}tool="(?:NAMES)"
"""


def check_content(name: str, content: str, tools: Collection[str] = (), *, may_quote: bool = False) -> None:
    """Check that a reply's content has nothing of a template: no markup of calls and thoughts, no role at its beginning.

    Nor a call, in whatever form, of one of the `tools` that were offered. One that `may_quote` a call may show it as code.
    """
    markup = _MARKUP.search(content)
    need(not markup, f"the content of '{name}' has markup, {markup and markup[0]!r}: {shorten(content)}")
    begins = (
        f"the content of '{name}' begins with a role, as if the chat template lacked its generation prompt: {shorten(content)}"
    )
    need(not _ROLE.match(content), begins)
    call = find_written_call(_blank_code(content) if may_quote else content, tools)
    need(call is None, f"the content of '{name}' has a call that is written as text, {call!r}: {shorten(content)}")


def _blank_code(content: str) -> str:
    """The content with a sign in place of all code that has an end."""
    return _CODE.sub(_IN_PLACE_OF_CODE, content)


def has_markup(content: str) -> bool:
    return _MARKUP.search(content) is not None


def find_written_call(content: str, tools: Collection[str]) -> str | None:
    """How a call of one of these tools begins that is written as JSON or Python; None if there is none."""
    found = _compile_call(frozenset(tools)).search(content) if tools else None
    return found[0].strip() if found else None


@cache
def _compile_call(tools: frozenset[str]) -> re.Pattern[str]:
    return re.compile(_CALL.replace("NAMES", "|".join(map(re.escape, sorted(tools)))), re.VERBOSE | re.MULTILINE)
