"""A second, tolerant reading of replies: whether the expected number or letter is there, in whatever form it is written.

A task's filter reads one form. gsm8k's flexible-extract takes the last of `(-?[$0-9.,]{2,})|(-?[0-9]+)`: of `$\\boxed{42}$.`
the `$.`; mmlu_pro's takes the letter behind "answer is", and none in bold (lm-eval 0.4.13). So a release that writes more LaTeX
loses points though it knows as much. This reading counts such answers; it never gives a score.
"""

import re
from decimal import Decimal, InvalidOperation

# The end of a reply, in which its answer is looked for.
LOOKED_AT = 2000
_LONGEST_NUMBER = 60
_NUMBER = r"-?(?:\d{1,30}(?:,\d{3}){0,9}|\d{1,30})(?:\.\d{1,30})?"
_TARGET_NUMBER = re.compile(rf"(?:[\s\S]*####)?\s*\$?({_NUMBER})\s*\.?\s*")
_TARGET_LETTER = re.compile(r"\s*\(?([A-J])\)?\.?\s*")
_BOXED = re.compile(r"\\boxed\s?\{((?:[^{}\n]|\{[^{}\n]{0,100}\}){0,200})\}")
_SAID = re.compile(r"\b(?:final )?answer(?: is|:)[\s:*_$\\(]{0,12}([^\n]{1,80}?)(?=\.\s|\n|$)", re.I)
_BOLD = re.compile(r"\*\*([^*\n]{1,80})\*\*")
# What LaTeX and Markdown put into and around a number or a letter.
_DRESS = re.compile(
    r"\\(?:text|mathrm|mathbf|textbf)\s?\{([^{}\n]{0,100})\}|\\[,;!%$ ]|[$*_`{}~]|\\(?:left|right|displaystyle)"
)


def reads_right(reply: str, target: str) -> bool | None:
    """Whether the reply gives the target. None if the target is neither a number nor a letter of a choice."""
    if number := _TARGET_NUMBER.fullmatch(target):
        wanted = _parse_number(number[1])
        return any(_parse_number(each) == wanted for each in _last_numbers(reply[-LOOKED_AT:]))
    if letter := _TARGET_LETTER.fullmatch(target):
        return letter[1] == _last_letter(reply[-LOOKED_AT:])
    return None


def _last_numbers(reply: str) -> list[str]:
    """The number of the last place that is marked as the answer; without one, the last number of all."""
    for marked in (_BOXED, _SAID, _BOLD):
        found = [numbers[-1] for text in marked.findall(reply) if (numbers := re.findall(_NUMBER, _undress(text)))]
        if found:
            return found[-1:]
    return re.findall(_NUMBER, _undress(reply))[-1:]


def _last_letter(reply: str) -> str | None:
    """The letter of the last place that is marked as the answer; without one, that of a last line that is one letter alone."""
    last_line = reply.strip().rpartition("\n")[2]
    for texts in (_BOXED.findall(reply), _SAID.findall(reply), _BOLD.findall(reply), [last_line]):
        found = [match[1] for text in texts if (match := re.match(r"\(?([A-J])\)?(?![A-Za-z])", _undress(text).strip()))]
        if found:
            return found[-1]
    return None


def _undress(text: str) -> str:
    return _DRESS.sub(r"\1", text)


def _parse_number(text: str) -> Decimal | None:
    try:
        return Decimal(text.replace(",", "")[:_LONGEST_NUMBER])
    except InvalidOperation:
        return None
