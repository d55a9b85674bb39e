"""The result of a comparison: what was compared, what the approval says, and what is here."""

from typing import Literal

from vllm_qualify.engine.image import EngineImage
from vllm_qualify.engine.server import ServerPlan
from vllm_qualify.plan.cell import Release
from vllm_qualify.recipe.values import Frozen

State = Literal["same", "different", "cannot be told"]
SAME: State = "same"
DIFFERENT: State = "different"
UNTOLD: State = "cannot be told"
MOST_SHOWN = 200


class Finding(Frozen):
    """One thing that was compared. `approved` and `here` are values in words; `note` says why a thing cannot be told."""

    what: str
    state: State
    approved: str = ""
    here: str = ""
    note: str = ""

    @property
    def line(self) -> str:
        """In one line, whatever the name of a file or a server's reply has in it."""
        approved, here = (shorten(text) if text else "" for text in (self.approved, self.here))
        both = [f"approved {approved}" if approved else "", f"here {here}" if here else ""]
        values = [here] if self.state == SAME else both
        said = "; ".join(text for text in (*values, shorten(self.note)) if text)
        return f"  {self.state:<14}  {shorten(self.what)}: {said}"


class Compared(Frozen):
    """A target with all that was found about it, in order."""

    target: str
    kind: Literal["folder", "image", "server"]
    findings: list[Finding]

    @property
    def differs(self) -> bool:
        return any(found.state == DIFFERENT for found in self.findings)

    @property
    def tells_something(self) -> bool:
        """Whether anything of it could be compared."""
        return any(found.state != UNTOLD for found in self.findings)

    @property
    def summary(self) -> str:
        """The result in words."""
        different = sum(found.state == DIFFERENT for found in self.findings)
        if different:
            return f"{different} {'thing differs' if different == 1 else 'things differ'} from what was approved"
        if self.tells_something:
            return "nothing differs in what could be compared"
        return "nothing could be compared"


def compare(what: str, approved: object, here: object) -> Finding:
    """The finding for two values that are the same if they are equal."""
    state = SAME if approved == here else DIFFERENT
    return Finding(what=what, state=state, approved=shorten(approved), here=shorten(here))


def untold(what: str, note: str, approved: object = "", here: object = "") -> Finding:
    """The finding for a thing that the target does not show."""
    return Finding(what=what, state=UNTOLD, approved=shorten(approved), here=shorten(here), note=note)


def shorten(value: object) -> str:
    """A value as text of at most MOST_SHOWN letters, in one line."""
    text = " ".join(", ".join(value).split() if isinstance(value, list) else str(value).split())
    return text if len(text) <= MOST_SHOWN else f"{text[: MOST_SHOWN - 1]}…"


def describe_engine(release: Release, server: ServerPlan) -> str:
    """The approved engine: its name, version and digest; of an image its reference, too."""
    image = f"{server.engine.repository}@" if isinstance(server.engine, EngineImage) else ""
    return f"{server.engine_kind.title} {release.engine.version} {image}{release.engine.digest}"
