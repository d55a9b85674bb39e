"""Waivers of gates."""

from datetime import date

from pydantic import Field

from vllm_qualify.recipe.values import Frozen, Name, Text


class Waiver(Frozen):
    """A gate of one cell that need not be passed until a given day, and the person who is responsible for that."""

    gate: Text = Field(
        description="the gate's name as reports have it, like `exact_match (gsm8k, strict-match) against the baseline`"
    )
    gpu_type: Name = Field(description="of the cell")
    variant: Name = Field(description="of the cell")
    profile: Name = Field(description="of the cell")
    owner: Text = Field(description="who answers for it")
    reason: Text = Field(description="why")
    expires: date = Field(description="the last day on which it holds, by UTC, like `2026-12-31`")
