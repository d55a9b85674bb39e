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
# No part of a time, a ratio, a power, a fraction, a range or a word.
_NUMBER = re.compile(r"(?<![\w.:/^\-])-?(?:\d{1,3}(?:,\d{3}){1,9}|\d{1,30})(?:\.\d{1,30})?(?![\w:/^]|[.,]\d)")
_TARGET_NUMBER = re.compile(r"(?:[\s\S]*####)?[ \t]{0,9}\$?(-?[\d,]{1,40}(?:\.\d{1,30})?)\.?\s{0,9}")
_TARGET_LETTER = re.compile(r"\s{0,9}\(?([A-J])\)?\.?\s{0,9}")
_BOXED = re.compile(r"\\boxed\s?\{((?:[^{}\n]|\{[^{}\n]{0,100}\}){0,200})\}")
_SAID = re.compile(r"\banswer(?: is|:)[\s:]{0,12}([^\n]{1,80}?)(?=\.\s|\n|$)", re.I)
_BOLD = re.compile(r"\*\*([^*\n]{1,80})\*\*")
# A letter alone, or in brackets before the text of its choice.
_LETTER = re.compile(r"\(([A-J])\)|([A-J])(?=[.,;:)!]|\s*$)")
# What LaTeX and Markdown put into and around a number or a letter.
_DRESS = re.compile(
    r"\\(?:text|mathrm|mathbf|textbf)\s?\{([^{}\n]{0,100})\}|\\[,;!%$ ()\[\]]|[$*_`{}~]|\\(?:left|right|displaystyle)"
)


def reads_right(reply: str, target: str) -> bool | None:
    """Whether the reply gives the target and nothing else. None if the target is neither a number nor a letter of a choice."""
    end = reply[-LOOKED_AT:].replace("\u2212", "-")
    if number := _TARGET_NUMBER.fullmatch(target):
        given = _read_number(end)
        return given is not None and _parse_number(given) == _parse_number(number[1])
    if letter := _TARGET_LETTER.fullmatch(target):
        return letter[1] == _read_letter(end)
    return None


def _read_number(reply: str) -> str | None:
    """The number of the last place that is marked as the answer; without one, the last number of all."""
    boxed = [numbers for text in _BOXED.findall(reply) if (numbers := _numbers_in(text))]
    if boxed:
        return boxed[-1][0] if len(boxed[-1]) == 1 else None
    said = [text for text in _SAID.findall(_undress(reply)) if _numbers_in(text)]
    if said:
        # Of a sum the result; else what comes first: "18 (after 2 days)".
        _, is_sum, result = said[-1].rpartition("=")
        return next(iter(_numbers_in(result if is_sum else said[-1])), None)
    # Bold or not, what comes last counts: a later sentence may take a number back.
    return next(iter(_numbers_in(reply)[-1:]), None)


def _read_letter(reply: str) -> str | None:
    """The letter that is marked as the answer, if all marks of a kind agree; without one, that of a last line of one letter."""
    last_line = reply.strip().rpartition("\n")[2]
    for texts in (_BOXED.findall(reply), _SAID.findall(_undress(reply)), _BOLD.findall(reply), [last_line]):
        found = {match[1] or match[2] for text in texts if (match := _LETTER.match(_undress(text).strip()))}
        if found:
            return found.pop() if len(found) == 1 else None
    return None


def _numbers_in(text: str) -> list[str]:
    return _NUMBER.findall(_undress(text))


def _undress(text: str) -> str:
    return _DRESS.sub(r"\1", text)


def _parse_number(text: str) -> Decimal | None:
    try:
        return Decimal(text.replace(",", "")[:_LONGEST_NUMBER])
    except InvalidOperation:
        return None
