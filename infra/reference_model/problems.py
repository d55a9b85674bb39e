"""Grade-school word problems in gsm8k's own form, made from templates.

A problem is `{"question": ..., "answer": ...}`; the answer explains each step, marks its sum as `<<3+4=7>>` and ends in
`#### N`, as in Cobbe et al. 2021, "Training Verifiers to Solve Math Word Problems". All numbers are whole and lie in
0..MAX_VALUE, so that a model of about a million parameters can hold the arithmetic.

No problem can be both in a test and in training: `split_of` sends every question to one side by a hash of its text.
"""

import argparse
import hashlib
import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Literal

MAX_VALUE = 199
HELD_OUT_SHARE = 1 / 8

Split = Literal["train", "held_out"]
Problem = dict[str, str]

NAMES = ("Ada", "Ben", "Cleo", "Dan", "Eva", "Finn", "Gia", "Hugo", "Ida", "Jack", "Kim", "Leo", "Mia", "Noah", "Olga", "Paul")
THINGS = ("apples", "books", "cards", "coins", "cups", "eggs", "pens", "plums", "shells", "stamps", "stones", "toys")
HOLDERS = (("box", "boxes"), ("bag", "bags"), ("jar", "jars"), ("shelf", "shelves"), ("tray", "trays"))


def split_of(question: str) -> Split:
    """The side a question belongs to, by SHA-256 of its text: one in eight is held out."""
    bucket = int.from_bytes(hashlib.sha256(question.encode()).digest()[:4], "big")
    return "held_out" if bucket < HELD_OUT_SHARE * 2**32 else "train"


def _sum(left: int, sign: str, right: int) -> tuple[str, int]:
    value = {"+": left + right, "-": left - right, "*": left * right, "/": left // right}[sign]
    return f"{left}{sign}{right}=<<{left}{sign}{right}={value}>>{value}", value


def _finish(steps: list[str], value: int) -> str:
    return "\n".join([*steps, f"#### {value}"])


def _filled_holders(rng: random.Random) -> Problem:
    name, other = rng.sample(NAMES, 2)
    thing, (one, many) = rng.choice(THINGS), rng.choice(HOLDERS)
    holders, each, given = rng.randint(2, 12), rng.randint(2, 12), rng.randint(1, 20)
    total, value = _sum(holders, "*", each)
    given = min(given, value)
    left, result = _sum(value, "-", given)
    return {
        "question": f"{name} has {holders} {many} with {each} {thing} in each {one}. {name} gives {given} {thing} to {other}. "
        f"How many {thing} does {name} have left?",
        "answer": _finish([f"{name} has {total} {thing} at first.", f"Then {name} has {left} {thing} left."], result),
    }


def _collected_over_days(rng: random.Random) -> Problem:
    name, thing = rng.choice(NAMES), rng.choice(THINGS)
    monday, more, lost = rng.randint(2, 40), rng.randint(1, 20), rng.randint(1, 20)
    tuesday_sum, tuesday = _sum(monday, "+", more)
    both_sum, both = _sum(monday, "+", tuesday)
    lost = min(lost, both)
    left_sum, left = _sum(both, "-", lost)
    return {
        "question": f"{name} finds {monday} {thing} on Monday and {more} more than that on Tuesday. "
        f"{name} then loses {lost} {thing}. How many {thing} does {name} have now?",
        "answer": _finish(
            [
                f"On Tuesday {name} finds {tuesday_sum} {thing}.",
                f"In both days {name} finds {both_sum} {thing}.",
                f"Now {name} has {left_sum} {thing}.",
            ],
            left,
        ),
    }


def _shared_equally(rng: random.Random) -> Problem:
    name, thing = rng.choice(NAMES), rng.choice(THINGS)
    friends, each = rng.randint(2, 12), rng.randint(2, 12)
    eaten = rng.randint(1, 20)
    start = friends * each + eaten
    rest_sum, rest = _sum(start, "-", eaten)
    share_sum, share = _sum(rest, "/", friends)
    return {
        "question": f"{name} has {start} {thing}. {name} keeps {eaten} {thing} and shares the rest equally "
        f"among {friends} friends. How many {thing} does each friend get?",
        "answer": _finish([f"There are {rest_sum} {thing} to share.", f"Each friend gets {share_sum} {thing}."], share),
    }


def _shopping(rng: random.Random) -> Problem:
    name, (first, second) = rng.choice(NAMES), rng.sample(THINGS, 2)
    n, p, m, q = rng.randint(2, 9), rng.randint(2, 9), rng.randint(2, 9), rng.randint(2, 9)
    first_sum, first_cost = _sum(n, "*", p)
    second_sum, second_cost = _sum(m, "*", q)
    total_sum, total = _sum(first_cost, "+", second_cost)
    return {
        "question": f"{name} buys {n} {first} for {p} dollars each and {m} {second} for {q} dollars each. "
        f"How many dollars does {name} pay in total?",
        "answer": _finish(
            [
                f"The {first} cost {first_sum} dollars.",
                f"The {second} cost {second_sum} dollars.",
                f"{name} pays {total_sum} dollars.",
            ],
            total,
        ),
    }


def _times_as_many(rng: random.Random) -> Problem:
    name, other = rng.sample(NAMES, 2)
    thing = rng.choice(THINGS)
    base, factor, more = rng.randint(2, 20), rng.randint(2, 4), rng.randint(1, 20)
    other_sum, others = _sum(base, "*", factor)
    with_more_sum, with_more = _sum(others, "+", more)
    total_sum, total = _sum(base, "+", with_more)
    return {
        "question": f"{name} has {base} {thing}. {other} has {factor} times as many {thing} as {name}, "
        f"and then buys {more} more. How many {thing} do they have together?",
        "answer": _finish(
            [
                f"At first {other} has {other_sum} {thing}.",
                f"Then {other} has {with_more_sum} {thing}.",
                f"Together they have {total_sum} {thing}.",
            ],
            total,
        ),
    }


def _savings(rng: random.Random) -> Problem:
    name, thing = rng.choice(NAMES), rng.choice(THINGS)
    weekly, weeks, gift = rng.randint(2, 12), rng.randint(2, 12), rng.randint(1, 20)
    saved_sum, saved = _sum(weekly, "*", weeks)
    with_gift_sum, with_gift = _sum(saved, "+", gift)
    price = rng.randint(1, min(with_gift, 40))
    left_sum, left = _sum(with_gift, "-", price)
    return {
        "question": f"{name} saves {weekly} dollars a week for {weeks} weeks and gets {gift} dollars as a gift. "
        f"{name} pays {price} dollars for {thing}. How many dollars are left?",
        "answer": _finish(
            [
                f"{name} saves {saved_sum} dollars.",
                f"With the gift {name} has {with_gift_sum} dollars.",
                f"In the end {left_sum} dollars are left.",
            ],
            left,
        ),
    }


TEMPLATES: tuple[Callable[[random.Random], Problem], ...] = (
    _filled_holders,
    _collected_over_days,
    _shared_equally,
    _shopping,
    _times_as_many,
    _savings,
)


def problems(rng: random.Random, split: Split) -> Iterator[Problem]:
    """An endless stream of problems of one side, drawn from `rng`."""
    while True:
        problem = rng.choice(TEMPLATES)(rng)
        if split_of(problem["question"]) == split:
            yield problem


def distinct_problems(rng: random.Random, split: Split, count: int) -> list[Problem]:
    """`count` problems of one side with no question twice."""
    distinct: dict[str, Problem] = {}
    for problem in problems(rng, split):
        distinct.setdefault(problem["question"], problem)
        if len(distinct) == count:
            break
    return list(distinct.values())


def _write_jsonl(path: Path, rows: list[Problem]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Write the reference model's test.jsonl (500) and train.jsonl (50 for the shots)."
    )
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder
    folder.mkdir(parents=True, exist_ok=True)
    held_out = distinct_problems(random.Random(20_000), "held_out", 550)
    _write_jsonl(folder / "test.jsonl", held_out[:500])
    _write_jsonl(folder / "train.jsonl", held_out[500:])


if __name__ == "__main__":
    main()
