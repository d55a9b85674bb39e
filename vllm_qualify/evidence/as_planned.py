"""Whether the server that left the evidence is the plan's: its config file and its log, held against the plan."""

from pathlib import Path
from typing import Any

from ruamel.yaml.error import YAMLError

from vllm_qualify.engine.server import CONFIG_FILE, LOG, ServerPlan, config_text
from vllm_qualify.engine.server_identity import check_identity
from vllm_qualify.errors import RecipeError
from vllm_qualify.evidence import starts
from vllm_qualify.evidence.load.greedy import UNDRAFTED
from vllm_qualify.evidence.load.result import BESIDE
from vllm_qualify.evidence.load.speculation import STAGE
from vllm_qualify.evidence.measurement import UNUSABLE, in_words
from vllm_qualify.evidence.stages.speculation import servers_in_turn
from vllm_qualify.plan.cell import CellPlan
from vllm_qualify.recipe.loading import load_yaml

# Differ from one start to the next.
_OF_THE_START = ("port",)


def served_otherwise(plan: ServerPlan, evidence: Path, *, taken_over: bool) -> str:
    """In what a server of the evidence is another one than the plan's, in words; empty if each start was of the plan's.

    Evidence that was `taken_over` from another run may be of a host on which the model's folder has another path.
    """
    try:
        folders = [inside / "serve" for inside in _start_folders(evidence)]
    except UNUSABLE as error:
        return in_words(error)
    return next((problem for folder in folders if (problem := _served_otherwise(plan, folder, taken_over))), "")


def drafted_otherwise(plan: CellPlan, evidence: Path, *, taken_over: bool) -> str:
    """As `served_otherwise`, of the servers with and without speculative decoding, in turn or of the one beside."""
    inside = evidence / STAGE / UNDRAFTED
    if plan.undrafted and inside.is_dir() and (problem := _served_otherwise(plan.undrafted, inside, taken_over)):
        return f"without speculation, {problem}"
    for number, (folder, server) in enumerate(servers_in_turn(plan, evidence), start=1):
        if problem := _served_otherwise(server, folder, taken_over):
            return f"start {number} of speculation: {problem}"
    return ""


def beside_otherwise(plan: CellPlan, evidence: Path, *, taken_over: bool) -> str:
    """As `served_otherwise`, of the baseline's server in each load that was measured in turns with it."""
    if plan.beside is None:
        return ""
    try:
        loads = [inside / "load" for inside in _start_folders(evidence)]
    except UNUSABLE as error:
        return in_words(error)
    for load in loads:
        if load.is_dir() and (problem := _served_otherwise(plan.beside, load / BESIDE, taken_over)):
            return f"beside it, {problem}"
    return ""


def _start_folders(evidence: Path) -> list[Path]:
    return [starts.root(evidence, number) for number in (starts.FIRST, *starts.further(evidence))]


def _served_otherwise(plan: ServerPlan, folder: Path, taken_over: bool) -> str:
    """As `served_otherwise`, of the start that left its files in `folder`."""
    try:
        config = _read_config((folder / CONFIG_FILE).read_text(encoding="utf-8"))
        log = (folder / LOG).read_text(encoding="utf-8", errors="replace")
    except (*UNUSABLE, YAMLError) as error:
        return f"its server left no usable file: {in_words(error)}"
    model = config.get("model")
    if taken_over and plan.is_local and not plan.in_container and isinstance(model, str) and model.startswith("/"):
        # The model's path on the host that served it.
        plan = plan.model_copy(update={"model": model})
    expected = _read_config(config_text(plan, 0))
    if different := sorted(name for name in config.keys() | expected.keys() if config.get(name) != expected.get(name)):
        return f"its server had another {', '.join(different)} than the plan"
    try:
        check_identity(plan, log, in_any_cache=True)
    except RecipeError as error:
        return error.problem
    return ""


def _read_config(text: str) -> dict[str, Any]:
    """A config file's options without those of a single start. Raises ValueError, or YAMLError."""
    document = load_yaml(text)
    if not isinstance(document, dict):
        raise ValueError(f"{CONFIG_FILE} is not a mapping")
    return {str(name): value for name, value in document.items() if name not in _OF_THE_START}
