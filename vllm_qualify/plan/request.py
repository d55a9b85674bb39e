"""What a caller says of a run beside the choice of cells: what they are compared with, and which evidence they take over."""

from typing import Literal, Self

from pydantic import ConfigDict, Field, model_validator

from vllm_qualify.recipe.values import Frozen

ReusedRuns = Literal["none", "unfinished", "all"]


class Against(Frozen):
    """What cells are compared with: by default each cell's newest baseline in the store."""

    model_config = ConfigDict(use_attribute_docstrings=True)

    run: str | None = None
    """the baseline, in place of the newest one"""
    establish: Literal["never", "none", "always"] = "never"
    """whether the run itself becomes the baseline: always, or only if there is none. An approved one is compared with it"""
    in_turns: bool = True
    """whether the baseline is served beside the candidate for the load, if this machine can do that"""
    anchor: str | None = None
    """the anchor, in place of the cell's own"""
    new_anchor: bool = False
    """whether a run that becomes the baseline begins anew: it is held against no earlier run, and becomes the anchor too"""

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if self.new_anchor and self.establish != "always":
            raise ValueError("a run becomes an anchor only as a baseline: `new_anchor` goes with `establish: always`")
        if self.new_anchor and self.anchor:
            raise ValueError("a run that becomes an anchor is held against none: leave `anchor` or `new_anchor` out")
        return self


class Reuse(Frozen):
    """Which finished stages a run takes over, if their inputs are the same."""

    model_config = ConfigDict(use_attribute_docstrings=True)

    of: ReusedRuns = "unfinished"
    """`unfinished`: those of runs that were interrupted on this machine. `all`: also those of runs that passed, here or in the
    store. `none`: all are measured"""
    most_age_days: float = Field(default=7, gt=0)
    """how old evidence may be, in days"""
