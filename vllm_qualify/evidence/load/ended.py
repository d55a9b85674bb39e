"""How a load ended: by its looks, or by its time budget."""

from pathlib import Path

from vllm_qualify.evidence.measurement import UNUSABLE, in_words
from vllm_qualify.recipe.load import Load
from vllm_qualify.recipe.values import Count, Frozen, Seconds

# The file in the stage's folder that says that the budget ended the load.
ENDED = "ended.json"


class Ended(Frozen):
    """`ended.json`: how many repeats a load had when its budget ended it, and how long they took."""

    time_budget_s: Seconds
    repeats: Count
    spent_s: Seconds
    longest_s: Seconds

    @property
    def is_right(self) -> bool:
        """Whether another repeat would have exceeded the budget."""
        return self.spent_s + self.longest_s > self.time_budget_s

    @property
    def because(self) -> str:
        done = f"{self.repeats} repeat{'s' if self.repeats > 1 else ''} in {self.spent_s:.0f} s"
        return f"time_budget_s {self.time_budget_s:g} ended the load after {done}: another may take {self.longest_s:.0f} s"


def end_of(stage: Path, count: int, settings: Load) -> tuple[Ended | None, list[str]]:
    """How the budget ended a load, None if it did not; and the problems if the load must not end after `count` repeats."""
    path, least, most = stage / ENDED, settings.looks[0], settings.looks[-1]
    if not path.exists():
        problem = f"{count} of at least {least} repeats" if count < least else f"{count} repeats of at most {most}"
        return None, [] if count in settings.looks else [problem]
    try:
        ended = Ended.model_validate_json(path.read_bytes())
    except UNUSABLE as error:
        return None, [f"{ENDED} is not the end of a load: {in_words(error)}"]
    planned = (settings.time_budget_s, count)
    if (ended.time_budget_s, ended.repeats) != planned or not ended.is_right or count >= most:
        because = f"it says: {ended.because}"
        return None, [f"{ENDED} is not of this load of {count} repeats and time_budget_s {settings.time_budget_s}: {because}"]
    return ended, []
