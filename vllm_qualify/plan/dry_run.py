"""The shell script of what a run would start. Nothing is started, pulled, asked or written."""

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

from vllm_qualify.engine.gpu import detect
from vllm_qualify.engine.image import EngineImage
from vllm_qualify.engine.kinds.registry import KINDS
from vllm_qualify.engine.launchers.registry import LAUNCHERS, launcher_of
from vllm_qualify.engine.provision import Launch, check_kind, check_launch, identity_of
from vllm_qualify.engine.server import CONFIG_FILE, Engine, ServerPlan, config_text, gpu_count
from vllm_qualify.errors import CallerError
from vllm_qualify.plan.cells import new_run_id
from vllm_qualify.plan.choice import Choice, Selection, select
from vllm_qualify.plan.forms import form_warnings
from vllm_qualify.plan.gates import judging_of
from vllm_qualify.plan.kv_scales import model_warnings
from vllm_qualify.plan.server import server_plan
from vllm_qualify.recipe.recipe import LoadedRecipe
from vllm_qualify.recipe.tables import known_versions, parse_version

PORT = 8000
DEFAULT_BRANCH = "main"


def server_scripts(loaded: LoadedRecipe, choice: Choice, vllm: str | None, image: str | None, runs: Path) -> Iterator[str]:
    """The servers' scripts only, for an image with this version of vLLM, by default the newest one. Raises as `scripts`."""
    version = parse_version((vllm or known_versions()[-1]).removeprefix("v"))
    major, minor, patch = (*version.release, 0, 0)[:3]
    kind = KINDS[select_cells(loaded, choice).variant.engine]
    by_default = f"vllm/vllm-openai:v{major}.{minor}.{patch}" if kind.has_client else kind.example_image
    launch = Launch(launcher="docker", image=image or by_default)
    return scripts(loaded, choice, launch, None, runs, str(version) if vllm or image is None else None, with_client=False)


def scripts(
    loaded: LoadedRecipe,
    choice: Choice,
    launch: Launch,
    port: int | None,
    runs: Path,
    vllm: str | None = None,
    with_client: bool = True,
) -> Iterator[str]:
    """A script for each chosen cell, for any GPU type, on any machine. `runs` is the folder of all runs.

    Arguments can depend on the version. It is `vllm`, that of the engine environment, or that of the image's tag.

    Raises CallerError as `select`, and for options that do not fit; HostError if there is no engine environment for the process
    launcher.
    """
    check_launch(launch)
    selection = select_cells(loaded, choice)
    check_kind(selection.variant.engine, launch.launcher, bool(launch.client_image) or not with_client)
    engine = LAUNCHERS[launch.launcher].name_engine(launch.image, selection.gpu_type)
    version = vllm or _find_version(engine, selection)
    for profile in selection.profiles:
        yield _write_script(loaded, selection, profile, engine, version, port or PORT, runs)


def select_cells(loaded: LoadedRecipe, choice: Choice) -> Selection:
    """The chosen cells, of any GPU type, by default of this machine's. Raises CallerError as `select`."""
    return select(loaded, Choice(**{**choice.model_dump(), "gpu_type": choice.gpu_type or detect().gpu_type}), None)


def _find_version(engine: Engine, selection: Selection) -> str:
    """The version of the environment, or of the image's tag; empty if nothing depends on it."""
    layers = (selection.serving, selection.variant, *selection.profiles.values())
    depends = selection.variant.vllm or any(layer.by_version for layer in layers)
    if not (selection.variant.of_vllm and depends):
        return ""
    if not isinstance(engine, EngineImage):
        return identity_of(engine).version
    match = re.match(r"v?([0-9]+\.[0-9]+(?:\.[0-9]+)?)", engine.tag or "")
    if match is None:
        problem = f"{engine.reference} does not say which vLLM it holds"
        raise CallerError(problem, "name the image by its version's tag; or see recipe show, with --vllm", "--image")
    return match[1]


def _write_script(
    loaded: LoadedRecipe, selection: Selection, profile: str, engine: Engine, version: str, port: int, runs: Path
) -> str:
    branch = selection.variant.revision or DEFAULT_BRANCH
    plan = server_plan(loaded, selection, profile, engine, version, branch)
    needed = 0 if selection.gpu_type == "cpu" else gpu_count(plan.arguments, plan.kind)
    plan = plan.model_copy(update={"gpus": list(range(needed))})
    cell = "/".join([loaded.recipe.name, selection.variant_name, selection.gpu_type, profile])
    run = new_run_id()
    config = runs / run / "evidence" / "serve" / CONFIG_FILE
    command = launcher_of(engine).shell_command(plan, config, port, {"run": run, "cell": cell})
    contract = judging_of(loaded.recipe, selection, profile)["contract"]
    told = [*model_warnings(plan, version), *form_warnings(plan, contract)]
    warnings = [f"# Warning: {warning}." for warning in told]
    folder, path, document = shlex.quote(str(config.parent)), shlex.quote(str(config)), config_text(plan, port).rstrip("\n")
    notes = [*_note_names(plan, branch), *_note_starts(loaded, selection, profile), *warnings]
    return "\n".join([f"# {cell}", *notes, f"mkdir -p {folder}", f"cat > {path} <<'END'", document, "END", command])


def _note_names(plan: ServerPlan, branch: str) -> list[str]:
    names = [] if plan.is_local else [f"{branch} becomes the commit behind it"]
    if isinstance(plan.engine, EngineImage) and plan.engine.digest is None:
        names.append(f"{plan.engine.reference} {'' if names else 'becomes '}its digest")
    downloads = [["hf", "download", part.name, "--revision", part.revision] for part in plan.repositories]
    fetched = [f"# It first fetches and checks what is read of the hub: {shlex.join(command)}" for command in downloads]
    return [f"# When a run starts, {' and '.join(names)}.", *fetched] if names else fetched


def _note_starts(loaded: LoadedRecipe, selection: Selection, profile: str) -> list[str]:
    gates = loaded.recipe.gates_of(selection.profiles[profile])
    if selection.serving.starts == 1 or not any(gate.is_over_starts for gate in gates):
        return []
    return [f"# The server is started up to {selection.serving.starts} times, for the gates against the baseline."]
