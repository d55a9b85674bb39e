"""The role of a setting stands at its field, and says what the setting changes."""

from typing import Annotated, Any

import pytest
from pydantic import create_model

from vllm_qualify.recipe.roles import EFFORT, PLACE, WORK, Settings, part
from vllm_qualify.recipe.values import Count


class Walk(Settings):
    steps: Annotated[Count, WORK] = 3
    pauses: Annotated[Count | None, EFFORT] = None
    path: Annotated[str, PLACE] = "a lane"


def test_a_part_has_the_settings_of_the_roles() -> None:
    assert part(Walk(), WORK) == {"steps": 3}
    assert part(Walk(pauses=2), EFFORT, PLACE) == {"pauses": 2, "path": "a lane"}
    run = create_model("Run", __base__=Walk, laps=(Annotated[Count, EFFORT], 1))
    assert part(run(), EFFORT) == {"pauses": None, "laps": 1}


@pytest.mark.parametrize("laps", [Count, Annotated[Count, WORK, EFFORT]], ids=["no role", "two roles"])
def test_a_field_that_does_not_have_one_role_is_refused_when_it_is_written(laps: Any) -> None:
    with pytest.raises(TypeError, match=r"Run\.laps: write its role"):
        create_model("Run", __base__=Walk, laps=(laps, 1))
