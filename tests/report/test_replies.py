"""Replies: thinking apart from the answer, and what differs between two answers; both by hand."""

import pytest

from vllm_qualify.report.flips import Pieces, mark_differences, split_thinking


@pytest.mark.parametrize(
    ("text", "thinking", "answer"),
    [
        ("It is 4.", None, "It is 4."),
        (" It is 4.\n", None, " It is 4.\n"),
        ("<think>2 and 2</think>It is 4.", "2 and 2", "It is 4."),
        ("\n<think>\n2 and 2\n</think>\n\nIt is 4.", "2 and 2", "It is 4."),
        # the chat template wrote the opening tag
        ("2 and 2</think>4", "2 and 2", "4"),
        # it thought twice
        ("<think>a</think>b</think>4", "a</think>b", "4"),
        ("<think>no end", "no end", ""),
        ("<think></think>", "", ""),
        ("write <think> as text", None, "write <think> as text"),
        ("", None, ""),
    ],
)
def test_thinking_is_apart(text: str, thinking: str | None, answer: str) -> None:
    assert split_thinking(text) == (thinking, answer)


@pytest.mark.parametrize(
    ("theirs", "ours", "pieces"),
    [
        (
            "the sum is 41 books",
            "the sum is 42 old books",
            (
                [("the sum is ", False), ("41", True), (" books", False)],
                [("the sum is ", False), ("42 old", True), (" books", False)],
            ),
        ),
        ("a b c", "a b c d", ([("a b c", False)], [("a b c", False), (" d", True)])),
        ("4 <b>\n", "4 <b>\n", ([("4 <b>\n", False)], [("4 <b>\n", False)])),
        ("one two three", "四 五 六 七 八 九 十", None),
        ("", "4", None),
    ],
    ids=["word by word", "what one alone has", "equal", "little in common", "empty"],
)
def test_what_differs_is_marked(theirs: str, ours: str, pieces: tuple[Pieces, Pieces] | None) -> None:
    assert mark_differences(theirs, ours) == pieces


@pytest.mark.parametrize("text", ["", "\r\n\t\u2028x", "\x00\x1b[2J\u202e", "<mark>&amp;</mark>", "e\u0301👩‍👩‍👧", "\ud800"])
def test_the_pieces_of_a_text_are_the_text(text: str) -> None:
    """Whatever is in them: nothing is lost and nothing added."""
    theirs, ours = f"the same words here {text}{text}", f"{text} the same words here"
    pieces = mark_differences(theirs, ours)
    assert pieces
    assert tuple("".join(part for part, _ in side) for side in pieces) == (theirs, ours)


def test_a_reply_made_to_be_hard_takes_little_work() -> None:
    """SequenceMatcher is cubic at worst; what is frequent in a long text is no start of a match, so the work stays small."""
    theirs, ours = "+." * 1000, ".+" * 700 + "+" * 600
    pieces = mark_differences(theirs, ours)
    assert pieces is None or "".join(part for part, _ in pieces[1]) == ours
