"""What a release costs, in minutes of its server.

A start whose caches are full takes 54 s, and 1,319 questions of gsm8k take 40 s: docs/measured.md. A repeat of a load lasts the
60 s that a recipe's `min_duration_s` asks for, and in turns the baseline's server has as much beside it.
"""

START_S, ANSWERS_S, QUESTIONS, REPEAT_S = 54.0, 40.0, 1319, 60.0


def of_answers(starts: int, asked: int) -> float:
    return (starts * START_S + asked / QUESTIONS * ANSWERS_S) / 60


def of_loads(starts: int, repeats: int, *, in_turns: bool) -> float:
    return (starts * START_S + repeats * REPEAT_S * (2 if in_turns else 1)) / 60
