"""The anchor that a recipe names for a cell."""

from pydantic import Field

from vllm_qualify.recipe.values import Frozen, Name, Text


class NamedAnchor(Frozen):
    """The run that a cell is held against for good: an approved one of the cell of its baseline, instead of the first."""

    run: Text = Field(description="an approved run that was made to be a baseline")
    gpu_type: Name = Field(description="of the cell")
    variant: Name = Field(description="of the cell")
    profile: Name = Field(description="of the cell")
