"""The base of recipes and all other documents of this project, and the types of single values."""

import re
from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict, Field


class Frozen(BaseModel):
    """Base of every typed document of this project."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


def _plain_name(name: str) -> str:
    if not re.fullmatch(r"[a-z0-9][a-z0-9._-]*", name):
        raise ValueError("use lower-case letters, digits, '.', '_' and '-', and begin with a letter or digit")
    return name


def _task_name(name: str) -> str:
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", name):
        raise ValueError("it is not the name of an lm-eval task: letters, digits, '.', '_' and '-'")
    return name


def _filter_name(name: str) -> str:
    # Great Expectations' page shows it as it is.
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._@-]*", name):
        raise ValueError("it is not the name of an lm-eval filter: letters, digits, '.', '_', '@' and '-'")
    return name


Name = Annotated[str, Field(strict=True, max_length=100), AfterValidator(_plain_name)]
TaskName = Annotated[str, Field(strict=True, max_length=100), AfterValidator(_task_name)]
FilterName = Annotated[str, Field(strict=True, max_length=100), AfterValidator(_filter_name)]
Text = Annotated[str, Field(strict=True, min_length=1)]
Count = Annotated[int, Field(strict=True, ge=1)]
CountOrNone = Annotated[int, Field(strict=True, ge=0)]
Seconds = Annotated[float, Field(strict=True, gt=0)]
Gibibytes = Annotated[float, Field(strict=True, ge=0.0625)]
Number = Annotated[float, Field(strict=True)]
NotNegative = Annotated[float, Field(strict=True, ge=0)]
Positive = Annotated[float, Field(strict=True, gt=0)]
Share = Annotated[float, Field(strict=True, ge=0, le=1)]
Flag = Annotated[bool, Field(strict=True)]
