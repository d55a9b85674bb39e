"""What a release costs, in minutes of its server.

Costs are stated, for a model of some billion parameters on an H200: a start with full caches takes 54 s (docs/measured.md has
starts of other sizes), and 1,319 questions of gsm8k take 40 s. A repeat of a load lasts the 60 s of `min_duration_s`; in turns
the baseline's server has as much beside it. Answers and loads are priced apart, each with its own starts, though a run shares
them. A candidate pays for its baseline's answers, though later candidates use them too.
"""

START_S, ANSWERS_S, QUESTIONS, REPEAT_S = 54.0, 40.0, 1319, 60.0


def of_answers(starts: int, asked: int) -> float:
    return (starts * START_S + asked / QUESTIONS * ANSWERS_S) / 60


def of_loads(starts: int, repeats: int, *, in_turns: bool) -> float:
    return (starts * START_S + repeats * REPEAT_S * (2 if in_turns else 1)) / 60
