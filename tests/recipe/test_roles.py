"""The role of a setting stands at its field, and says what the setting changes."""

from typing import Annotated

import pytest

from vllm_qualify.recipe.roles import EFFORT, PLACE, WORK, Settings, part
from vllm_qualify.recipe.values import Count


class Walk(Settings):
    steps: Annotated[Count, WORK] = 3
    pauses: Annotated[Count | None, EFFORT] = None
    path: Annotated[str, PLACE] = "a lane"


def test_a_part_has_the_settings_of_the_roles() -> None:
    assert part(Walk(), WORK) == {"steps": 3}
    assert part(Walk(pauses=2), EFFORT, PLACE) == {"pauses": 2, "path": "a lane"}


def test_what_inherits_settings_has_their_roles() -> None:
    class Run(Walk):
        laps: Annotated[Count, EFFORT] = 1

    assert part(Run(), EFFORT) == {"pauses": None, "laps": 1}


def test_a_field_without_a_role_is_refused_when_it_is_written() -> None:
    with pytest.raises(TypeError, match=r"Run\.laps: write its role"):

        class Run(Walk):
            laps: Count = 1


def test_a_field_with_two_roles_is_refused() -> None:
    with pytest.raises(TypeError, match=r"Run\.laps: write its role"):

        class Run(Walk):
            laps: Annotated[Count, WORK, EFFORT] = 1
