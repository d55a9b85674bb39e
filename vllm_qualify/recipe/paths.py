"""The paths that an answer can take through a busy server, and how a server is asked on each of them."""

import json
from collections.abc import Collection
from typing import Annotated, Literal

from pydantic import Field

from vllm_qualify.recipe.contract import Capability
from vllm_qualify.recipe.metrics import CONSTRAINED, PATHS, REORDERED
from vllm_qualify.recipe.roles import EFFORT, WORK, Settings
from vllm_qualify.recipe.serving import Environment, ServerArguments
from vllm_qualify.recipe.values import Count, Flag, Seconds, Text

BusyPath = Literal["cached", "concurrent", "aborted", "constrained", "evicted", "awake", "reordered"]
# What a model promises whose replies can be held to a form.
FORMS: frozenset[Capability] = frozenset({"json_schema", "tools"})
# The option that may name the backend of all forms.
FORMS_OPTION = "structured-outputs-config"
# A server can be put to sleep with this option; its requests for that are there only with this variable.
SLEEP_OPTION, DEVELOPMENT = "enable-sleep-mode", "VLLM_SERVER_DEV_MODE"
# The longest reply with a form, with its thoughts. The forms themselves have some dozens of tokens.
MOST_FORM_TOK = 512


class Paths(Settings):
    """The same prompts on each path that an answer can take through a busy server. They are the recipe's accuracy questions."""

    leave_out: Annotated[dict[BusyPath, Text], WORK] = Field(
        {},
        description="paths that are not taken, each with the reason, which reports show: `cached`, `concurrent`, `aborted`,"
        " `constrained`, `evicted`, `awake`, `reordered`. They are not judged. `cold` is always taken",
    )
    num_prompts: Annotated[int, Field(strict=True, ge=16, le=10_000), EFFORT] = Field(
        64, description="how many of the accuracy questions are asked on each path, if there are so many"
    )
    reply_tok: Annotated[int, Field(strict=True, ge=1, le=256), WORK] = Field(
        16, description="the tokens of each reply; their likelihoods are compared"
    )
    num_concurrent: Annotated[Count | None, WORK] = Field(
        None, description="requests at once; none is as many as the load has clients, up to 64"
    )
    filler_tok: Annotated[Count, WORK] = Field(
        512, description="the tokens of each of the other prompts that keep the server busy and push prompts out of its cache"
    )
    most_filler_tok: Annotated[Count, EFFORT] = Field(
        2_000_000,
        description="the most tokens of other prompts that are sent to push prompts out of the cache. A larger cache makes"
        " `evicted` invalid: leave it out, or raise this",
    )
    num_aborts: Annotated[Count, EFFORT] = Field(96, description="how many clients hang up before `aborted`")
    num_constrained: Annotated[Count, EFFORT] = Field(
        512,
        description="how many replies must fit a JSON schema or call a tool, where `capabilities` promise that: a quarter of"
        " them are for a schema if both are promised, and most of the calls are streamed",
    )
    most_form_tok: Annotated[int, Field(strict=True, ge=16, le=MOST_FORM_TOK), WORK] = Field(
        MOST_FORM_TOK,
        description="the most tokens of a reply with a form. One in eight may think before; others may have little more than"
        " the form takes",
    )
    must_be_proven: Annotated[Flag, WORK] = Field(
        True,
        description="whether a path that cannot be proven makes the verdict `invalid`. With `false`, that path is not judged. A"
        " profile that says nothing of `paths` has `false`",
    )
    time_limit_s: Annotated[Seconds, EFFORT] = Field(120.0, description="for each request")

    def taken(self, capabilities: Collection[Capability], *, sleeps: bool) -> list[str]:
        """The paths that are taken of a model with these capabilities, in their order. `sleeps`: its server can do that.

        What keeps the server busy on the other paths pushes prompts out of its cache, too, so `evicted` comes after them. A
        server that was woken has an empty cache, so `awake` is the last.
        """
        *before, evicted, awake = PATHS
        forms = [] if FORMS.isdisjoint(capabilities) else [CONSTRAINED]
        paths = [*before, *forms, evicted, *([awake] if sleeps else [])]
        return [path for path in paths if path not in self.leave_out]

    def reorders(self, capabilities: Collection[Capability]) -> bool:
        """Whether a further start of a server with these capabilities is asked for another form first."""
        return "json_schema" in capabilities and CONSTRAINED not in self.leave_out and REORDERED not in self.leave_out


def names_backend(options: ServerArguments) -> bool:
    """Whether these options say which backend keeps replies to their forms. Else the first form after a start decides it."""
    settings = options.get(FORMS_OPTION)
    try:
        settings = json.loads(settings) if isinstance(settings, str) else settings
    except (ValueError, RecursionError):
        settings = None
    within = settings.get("backend") if isinstance(settings, dict) else None
    return options.get(f"{FORMS_OPTION}.backend", within) not in (None, "auto")


def can_sleep(options: ServerArguments, variables: Environment) -> bool:
    """Whether a server with these options and variables can be put to sleep, and takes requests for that."""
    return options.get(SLEEP_OPTION) is True and variables.get(DEVELOPMENT, "0") not in ("", "0")


# What a profile has that says nothing of paths.
UNASKED = Paths(must_be_proven=False)
