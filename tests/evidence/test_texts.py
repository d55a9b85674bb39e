"""Faults of texts, by hand: loops at the end, and other scripts."""

import random

import pytest

from vllm_qualify.evidence.accuracy.texts import ends_in_loop, is_in_other_script

SENTENCE = "Finn has 41 books. "
RUSSIAN, CHINESE, GREEK = "\u043e\u0442\u0432\u0435\u0442", "\u7b54\u6848\u662f", "\u03c0"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", False),
        ("x" * 199, False),
        ("x" * 200, True),
        (SENTENCE * 11, True),  # 209 characters
        (SENTENCE * 10, False),  # 190 characters
        ("So it is. " + SENTENCE * 11, True),
        (SENTENCE * 50 + "Finn ha", True),  # it was cut within the part
        (SENTENCE * 50 + "\n\n", True),
        (SENTENCE * 50 + "The answer is 41.", False),  # it got out again
        ("a" * 99 + "b", False),
        (("a" * 99 + "b") * 3, False),  # three times only
        (("a" * 99 + "b") * 4, True),
        ("".join(f"{number}. " for number in range(200)), False),
        ("| a | b |\n|---|---|\n" + "-" * 150, False),
    ],
)
def test_what_ends_in_a_loop(text: str, expected: bool) -> None:
    assert ends_in_loop(text) is expected


def test_a_loop_is_found_whatever_its_part_is_and_none_where_there_is_none() -> None:
    """Of 1 to 1,000 characters, which is a quarter of what is looked at; and text of two letters has short parts often."""
    rng = random.Random(1)
    for length in (1, 2, 3, 7, 19, 20, 21, 64, 500, 1000):
        part = "".join(rng.choice("abcdefg \n") for _ in range(length - 1)) + "z"
        assert ends_in_loop("It begins. " + part * (4000 // length + 1)), length
    assert not any(ends_in_loop("".join(rng.choice("ab") for _ in range(4000))) for _ in range(50))


@pytest.mark.parametrize(
    ("text", "asked", "expected"),
    [
        ("The answer is 4.", "What is 2 + 2?", False),
        (RUSSIAN, "What is 2 + 2?", True),
        (f"The answer, {CHINESE}", "What is 2 + 2?", True),  # 3 of 12 letters
        (f"The answer is about {GREEK}", "What is 2 + 2?", False),  # 1 of 17 letters
        (f"The answer {GREEK}", "What is 2 + 2?", False),  # 1 of 10 letters: not more than a tenth
        (f"The answe {GREEK}", "What is 2 + 2?", True),  # 1 of 9
        (RUSSIAN, f"Say 'answer' in Russian. Expected: {RUSSIAN}", False),
        ("4", "What is 2 + 2?", False),
        ("", "", False),
        ("\U0001d465\uff58\u00b2", "x", False),  # bold and wide letters are letters all the same
        ("\ud800\x00\u202e", "x", False),
    ],
)
def test_what_is_in_another_script(text: str, asked: str, expected: bool) -> None:
    assert is_in_other_script(text, asked) is expected


def test_a_text_made_to_be_hard_takes_little_work() -> None:
    """Linear in the text; each test has a time limit."""
    assert ends_in_loop("ab" * 1_000_000)
    assert is_in_other_script("".join(map(chr, range(0x100, 0xD7FF))) * 10, "a")
