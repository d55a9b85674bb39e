"""The base of recipes and all other documents of this project, and the types of single values."""

import re
from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict, Field


class Frozen(BaseModel):
    """Base of every typed document of this project."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


def matches(pattern: str, problem: str) -> AfterValidator:
    """A check that the whole text is of a pattern; else `problem` says what is wrong."""

    def check(name: str) -> str:
        if not re.fullmatch(pattern, name):
            raise ValueError(problem)
        return name

    return AfterValidator(check)


_PLAIN = matches(r"[a-z0-9][a-z0-9._-]*", "use lower-case letters, digits, '.', '_' and '-', and begin with a letter or digit")
_TASK = matches(r"[A-Za-z0-9][A-Za-z0-9._-]*", "it is not the name of an lm-eval task: letters, digits, '.', '_' and '-'")
# Great Expectations' page shows it as it is.
_FILTER = matches(
    r"[A-Za-z0-9][A-Za-z0-9._@-]*", "it is not the name of an lm-eval filter: letters, digits, '.', '_', '@' and '-'"
)
Name = Annotated[str, Field(strict=True, max_length=100), _PLAIN]
TaskName = Annotated[str, Field(strict=True, max_length=100), _TASK]
FilterName = Annotated[str, Field(strict=True, max_length=100), _FILTER]
Text = Annotated[str, Field(strict=True, min_length=1)]
Count = Annotated[int, Field(strict=True, ge=1)]
CountOrZero = Annotated[int, Field(strict=True, ge=0)]
Seconds = Annotated[float, Field(strict=True, gt=0)]
Milliseconds = Annotated[float, Field(strict=True, gt=0)]
Gibibytes = Annotated[float, Field(strict=True, ge=0.0625)]
Number = Annotated[float, Field(strict=True)]
NotNegative = Annotated[float, Field(strict=True, ge=0)]
Positive = Annotated[float, Field(strict=True, gt=0)]
Share = Annotated[float, Field(strict=True, ge=0, le=1)]
PositiveShare = Annotated[float, Field(strict=True, gt=0, le=1)]
Drawn = Annotated[str, Field(strict=True), matches("([0-9a-f]{32})?", "it is nothing that was drawn: 32 hexadecimal digits")]
Flag = Annotated[bool, Field(strict=True)]


def expand_user(path: str) -> Path:
    """The path with a user's folder in place of `~`. Of a user that is not there it stays, and is no path of a file.

    So it does where no user can have the name: it has a zero byte, or half of a character.
    """
    try:
        return Path(path).expanduser()
    except (RuntimeError, ValueError):
        return Path(path)
