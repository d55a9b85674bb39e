"""How much of a score is form: a second reading of replies that a task's filter does not read."""

import time

import pytest

from vllm_qualify.evidence.accuracy.form import reads_right

NUMBER = "She has 6 * 7 = 42 apples.\n#### 42"
# Tried with lm-eval 0.4.13: gsm8k's flexible-extract reads another answer or none in each of these.
RIGHT = [
    r"So the answer is $\boxed{42}$.",
    "We get\n$$\n\\boxed{42}\n$$\n",
    r"It is \boxed{\text{42}}",
    r"\boxed{\$42}",
    "She has **42** apples.",
    "She has 42 apples...",
    "The final answer is: $42$",
    "That makes 42.00",
    "Answer: \\(42\\)",
    "The answer is 40 + 2 = 42.\n",
    "Final answer: **42** (after 2 days)",
    "**Answer**: 42",
]
WRONG = [
    "The total is **42**... Wait, I forgot 3 eggs. So she makes 48 dollars.",
    "It leaves at 10:42.",
    "42:2 is the ratio",
    "That is 10^42",
    "from 10-42",
    "42/2",
    r"\boxed{42 or 43}",
    "a room of 7 m^42",
    "The answer is 43. There are 42 others",
    "**41**",
    r"\boxed{4}2",
    "4 2",
    "nothing",
    "",
    "42 pears, then 17 apples",
]
LETTERS = [
    ("The answer is **C**.", True),
    (r"\boxed{C}", True),
    ("Answer: C", True),
    ("The correct option is **(C) water**", True),
    ("I think\n\nC", True),
    ("the answer is (B)", False),
    ("**A.** wrong.\n**C.** wrong, see above.\n\nSo B fits best.", False),
    ("The answer is (B). I considered whether the answer is C, but no.", False),
    ("Answer: C omes from the past", False),
    ("The correct answer is: C combination of B and D, so (J)", False),
    ("The answer is C6H6, choice B", False),
    ("it is Definitely (C)", False),
    ("Because C is wrong.", False),
    ("**Careful**", False),
]
HOSTILE = ["\\boxed{", "answer is ", "**", "{", "\\boxed{{", "1,", "9", "\\text{", "(", "\n"]


@pytest.mark.parametrize("reply", RIGHT)
def test_a_right_number_is_found_in_whatever_form_it_is_written(reply: str) -> None:
    assert reads_right(reply, NUMBER) is True
    assert reads_right(reply, "42") is True
    assert reads_right(reply, "#### 43") is False


@pytest.mark.parametrize("reply", WRONG)
def test_another_number_is_not_taken_for_it(reply: str) -> None:
    assert reads_right(reply, NUMBER) is False


@pytest.mark.parametrize(("reply", "is_right"), LETTERS)
def test_a_letter_counts_where_it_is_given_as_the_answer(reply: str, is_right: bool) -> None:
    assert reads_right(reply, "C") is is_right
    assert reads_right(reply, "(C)") is is_right


def test_signs_and_thousands_are_read() -> None:
    assert reads_right("It is \u22125 degrees", "-5")
    assert reads_right("$1,000", "1000")
    assert reads_right("3.50", "3.5")
    assert not reads_right("x = 10-5", "-5")


def test_of_other_answers_it_cannot_tell() -> None:
    assert [reads_right("42", target) for target in ("a text", "yes", "", "1/2", "K")] == [None] * 5


@pytest.mark.parametrize("piece", HOSTILE)
def test_a_hostile_reply_is_read_at_once(piece: str) -> None:
    """A pattern whose work grows with the square of the reply takes minutes."""
    began_s = time.process_time()
    for target in (NUMBER, "C"):
        reads_right(piece * (200_000 // len(piece)), target)
    assert time.process_time() - began_s < 20
