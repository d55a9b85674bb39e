"""What a setting changes. The role of a setting stands at its field; each rule about settings follows from the roles."""

from enum import Enum
from typing import Any

from vllm_qualify.recipe.values import Frozen


class Role(Enum):
    """What changes with a setting."""

    WORK = "work"
    """What is measured: measurements with another value are not compared."""
    EFFORT = "effort"
    """How long, how often or how carefully it is measured: another run with another value is not taken over."""
    PLACE = "place"
    """Where something lies. Its content is known by a hash, or is read where it counts."""
    NOTE = "note"
    """What people read: nothing is measured or judged by it."""
    FOUND = "found"
    """What no recipe says: it was found on a machine or in a store, or the caller said it."""


WORK, EFFORT, PLACE, NOTE, FOUND = Role


class Settings(Frozen):
    """Base of documents whose fields have a role each, like `Annotated[Count, WORK]`. Without one, the class is refused."""

    @classmethod
    def __pydantic_init_subclass__(cls, **_: Any) -> None:
        for name in cls.model_fields:
            role_of(cls, name)


def role_of(settings: type[Settings], name: str) -> Role:
    """The role of a field. Raises TypeError if the field has none, or several."""
    roles = [each for each in settings.model_fields[name].metadata if isinstance(each, Role)]
    if len(roles) != 1:
        raise TypeError(f"{settings.__name__}.{name}: write its role, as in Annotated[int, WORK]: see recipe/roles.py")
    return roles[0]


def part(settings: Settings, *roles: Role) -> dict[str, Any]:
    """The settings with one of these roles, as JSON, by their names. A setting that is a document itself is whole."""
    names = {name for name in type(settings).model_fields if role_of(type(settings), name) in roles}
    return settings.model_dump(mode="json", include=names)
