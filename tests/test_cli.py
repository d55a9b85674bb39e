"""The command's manners: one clear error, the right exit code, nothing started for nothing."""

import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path

import pytest

from tests.ci import IN_CI
from tests.fakes.vllm import leave_unclear, make_engine
from tests.qualified import COMMAND, run
from tests.recipe.importing.documents import published_document, written
from tests.recipes import Document, reference, write
from vllm_qualify.cli.run import _check_early
from vllm_qualify.engine.provision import Launch
from vllm_qualify.errors import HostError
from vllm_qualify.plan.choice import Choice
from vllm_qualify.plan.request import Against
from vllm_qualify.recipe.loading import catalog_folder
from vllm_qualify.runs.request import QualifyRelease

RunMine = Callable[..., subprocess.CompletedProcess[str]]

pytestmark = [pytest.mark.prefect, pytest.mark.usefixtures("prefect_server")]


def command(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return run(Path(os.environ["VLLM_QUALIFY_HOME"]), COMMAND, *arguments, **environment)


@pytest.fixture
def fake_engine(tmp_path: Path) -> dict[str, str]:
    return {"VLLM_QUALIFY_ENGINE": str(make_engine(tmp_path / "engine"))}


@pytest.fixture
def document() -> Document:
    edited = reference()
    edited["gpu_types"]["cpu"]["startup_timeout_s"] = 2
    edited["gates"] = [gate for gate in edited["gates"] if not {"max_loss", "max_nll_increase"} & gate.keys()]
    return edited


@pytest.fixture
def taken_port() -> Iterator[int]:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        yield taken.getsockname()[1]


def ends(done: subprocess.CompletedProcess[str], code: int, *messages: str) -> None:
    """With this exit code, each of these messages and no traceback."""
    assert done.returncode == code, done.stdout + done.stderr
    assert [message for message in messages if message not in done.stderr] == [], done.stderr
    assert "Traceback" not in done.stderr


@pytest.fixture
def run_mine(tmp_path: Path, document: Document, fake_engine: dict[str, str]) -> RunMine:
    """Runs the document as it is then, with more of the environment."""
    return lambda **more: command("run", str(write(document, tmp_path / "mine.yaml")), **fake_engine, **more)


def nothing_was_published(home: Path) -> bool:
    return not list((home / "store").glob("reports/**/manifest.json"))


def test_help_tells_the_exit_codes_and_the_version_is_that_of_the_package() -> None:
    for arguments in (["--help"], ["run", "--help"], ["demo", "--help"], ["rejudge", "--help"]):
        text = " ".join(command(*arguments).stdout.split())
        assert "0 passed (or done), 1 not passed, 2 the caller's mistake, 3 the world's fault" in text
    done = command("--version")
    assert (done.returncode, done.stdout) == (0, f"vllm-qualify {metadata.version('vllm-qualify')}\n")
    done = subprocess.run([sys.executable, "-m", "vllm_qualify", "--help"], capture_output=True, text=True, check=True)
    assert "python -m vllm_qualify [OPTIONS] COMMAND" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("run no-such-recipe", "there is no recipe 'no-such-recipe'"),
        ("run org/model", "draft a recipe of it: `vllm-qualify recipe new org/model --output mine.yaml`"),
        (f"run {catalog_folder()}/reference/model", f"`vllm-qualify recipe new {catalog_folder()}/reference/model --output"),
        ("run recipes/mine.yaml", "name a YAML file"),
        ("run reference --launcher rocket", "rocket"),
        ("run reference --port 70000", "65535"),
        ("report show no-such-run", "no run 'no-such-run'"),
        ("rejudge no-such-run", "no run 'no-such-run'"),
        ("frobnicate", "frobnicate"),
        # what the recipe does not have
        ("run reference --variant fp8", "no variant 'fp8'"),
        ("run reference --profile turbo", "no profile 'turbo'"),
        ("run reference --gpu-type h100", "no GPU type 'h100'"),
        ("run reference --store ftp://somewhere", "--store"),
        ("run reference", "reference/bf16/cpu/balanced has gates against a baseline, and file:///"),
        ("run reference --variant regressed", "has none of reference/bf16/cpu/balanced"),
        ("run reference --baseline no-such-run", "no whole run 'no-such-run'"),
        ("run reference --baseline x --establish-baseline", "leave one of the two out"),
        ("run reference --new-anchor", "add --establish-baseline"),
        ("run reference --establish-baseline --new-anchor --anchor x", "leave --anchor out"),
    ],
)
def test_a_callers_mistake_ends_with_2(arguments: str, message: str, fake_engine: dict[str, str]) -> None:
    ends(command(*arguments.split(), **fake_engine), 2, message)


def test_a_mistake_in_a_recipe_ends_with_2_before_anything_starts(tmp_path: Path, home: Path, document: Document) -> None:
    document["gpu_types"]["cpu"]["profiles"]["balanced"]["load"]["max_concurrency"] = 0
    place = f"{tmp_path / 'mine.yaml'}: gpu_types.cpu.profiles.balanced.load.max_concurrency"
    ends(command("run", str(write(document, tmp_path / "mine.yaml"))), 2, place)
    assert not list(home.glob("*/*"))


@pytest.mark.parametrize(
    ("behaviour", "message", "whose"),
    [
        ("dies", "the fake dies as ordered", "who must act is unclear"),
        ("hangs", "loading weights for ever", "the release's owner must act"),
    ],
)
def test_a_server_that_does_not_start_ends_with_3_its_stage_and_its_last_lines(
    home: Path, document: Document, run_mine: RunMine, behaviour: str, message: str, whose: str
) -> None:
    document["gpu_types"]["cpu"]["environment"] = {"TORCH_FAKE_VLLM": behaviour}
    ends(run_mine(), 3, message, f"error ({whose}): serve:")
    assert nothing_was_published(home)
    assert message in next(home.glob("runs/*/evidence/serve/server.log")).read_text()


def test_a_port_in_use_ends_with_3(fake_engine: dict[str, str], home: Path, taken_port: int) -> None:
    done = command("run", "reference", "--establish-baseline", "--port", str(taken_port), **fake_engine)
    ends(done, 3, f"serve: port {taken_port} is in use")
    assert nothing_was_published(home)


def test_a_missing_model_ends_with_3(document: Document, run_mine: RunMine) -> None:
    document["variants"]["bf16"]["model"] = "./nowhere"
    ends(run_mine(), 3, "check: no model at")


def test_missing_questions_end_with_3_before_a_server_is_started(home: Path, document: Document, run_mine: RunMine) -> None:
    document["accuracy"][0]["questions"]["shots"] = "./none.jsonl"
    ends(run_mine(), 3, "no questions at")
    assert not list(home.glob("runs/*"))


def test_a_store_that_refuses_ends_with_3_before_a_server_is_started(
    tmp_path: Path, home: Path, fake_engine: dict[str, str]
) -> None:
    (tmp_path / "file").write_text("not a folder")
    done = command("run", "reference", "--store", f"file://{tmp_path}/file/store", **fake_engine)
    ends(done, 3, "error (the store's owner must act)")
    assert not list(home.glob("runs/*"))


def test_a_machine_without_an_engine_or_a_home_ends_with_3_and_the_remedy(tmp_path: Path, fake_engine: dict[str, str]) -> None:
    ends(command("run", "reference", VLLM_QUALIFY_ENGINE=str(tmp_path)), 3, "remedy: run `vllm-qualify engine install`")
    (tmp_path / "file").write_text("not a folder")
    ends(command("run", "reference", VLLM_QUALIFY_HOME=f"{tmp_path}/file/home", **fake_engine), 3, "set VLLM_QUALIFY_HOME")


def test_secrets_reach_no_output_and_no_file(home: Path, document: Document, run_mine: RunMine) -> None:
    """The stand-in dies and says what it was given: the worst a tool can do."""
    document["gpu_types"]["cpu"]["environment"] = {"TORCH_FAKE_VLLM": "tells"}
    of_stores = {"AWS_SECRET_ACCESS_KEY": "very/secret/key", "OPENAI_API_KEY": "sk-secret-key"}
    secrets = {"HF_TOKEN": "hf_very_secret_token", **of_stores}
    done = run_mine(**secrets)
    # The model is local: its server downloads nothing.
    assert (done.returncode, "HF_TOKEN=None" in done.stderr) == (3, True)
    written = b"".join(path.read_bytes() for path in home.rglob("*") if path.is_file())
    for secret in secrets.values():
        assert secret not in done.stdout + done.stderr
        assert secret.encode() not in written


# --- images

NO_DOCKER = {"DOCKER_HOST": "unix:///nonexistent"}
IMAGE = "vllm/vllm-openai:v0.32.0"
IN_DOCKER = ("run", "reference", "--launcher", "docker")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (IN_DOCKER, "--image: --launcher docker needs an image"),
        (("run", "reference", "--image", IMAGE), "--image: only containers are made from an image"),
        (("run", "reference", "--client-image", IMAGE), "--client-image: only containers are made from an image"),
        ((*IN_DOCKER, "--image", "VLLM openai:1"), "--image: 'VLLM openai:1' is not an image reference"),
    ],
)
def test_a_mistake_in_the_images_ends_with_2_and_names_the_option(arguments: tuple[str, ...], message: str, home: Path) -> None:
    ends(command(*arguments, **NO_DOCKER), 2, f"error (the caller must act): {message}")
    assert not list(home.glob("runs/*"))


def test_a_machine_without_docker_ends_with_3_and_may_be_tried_again(home: Path) -> None:
    problem = "error (the operator must act): check: no Docker Engine answers at unix:///nonexistent"
    again = "class: docker-gone; the same thing tried again may well succeed"
    ends(command(*IN_DOCKER, "--image", IMAGE, **NO_DOCKER), 3, problem, again)
    assert not list(home.glob("runs/*"))


def test_a_registrys_limit_is_left_to_the_flow_which_waits(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A problem of an image is reported before Prefect is loaded."""
    kind = "registry-rate-limit"

    def find_engines(_: Launch) -> None:
        raise HostError("no image", "see the registry", "check", kind=kind, retry=True)

    monkeypatch.setattr("vllm_qualify.engine.provision.find_engines", find_engines)
    request = QualifyRelease(
        recipe="reference",
        choice=Choice(gpu_type="cpu"),
        launch=Launch(launcher="docker", image=IMAGE),
        store=(home / "store").as_uri(),
        against=Against(establish="always"),
    )
    _check_early(request)
    kind = "registry-unreachable"
    with pytest.raises(HostError, match="no image"):
        _check_early(request)


def test_a_dry_run_needs_no_docker_and_writes_nothing(home: Path, fake_engine: dict[str, str]) -> None:
    done = command(*IN_DOCKER, "--image", IMAGE, "--port", "8123", "--dry-run", HF_TOKEN="hf_secret_of_mine", **NO_DOCKER)
    assert done.returncode == 0, done.stderr
    assert [text for text in ("docker run", IMAGE, "--publish 127.0.0.1:8123:8000") if text not in done.stdout] == []
    assert "HF_TOKEN" not in done.stdout
    assert "hf_secret_of_mine" not in done.stdout + done.stderr
    done = command("run", "reference", "--dry-run", **fake_engine)
    assert done.returncode == 0, done.stderr
    assert f"{fake_engine['VLLM_QUALIFY_ENGINE']}/bin/vllm serve --config" in done.stdout
    assert not list(home.iterdir())


def test_a_dry_run_tells_of_a_task_that_is_not_there(tmp_path: Path, fake_engine: dict[str, str]) -> None:
    document = reference()
    document["accuracy"][0]["task"] = "gsm8kk"
    done = command("run", str(write(document, tmp_path / "mine.yaml")), "--dry-run", **fake_engine)
    assert done.returncode == 2, done.stdout + done.stderr
    assert "has no task gsm8kk; the nearest is gsm8k" in done.stderr
    assert done.stdout == ""


def test_doctor_has_a_line_for_everything_and_docker_is_needed_only_to_clean(
    tmp_path: Path, fake_engine: dict[str, str]
) -> None:
    done = command("doctor", **fake_engine, **NO_DOCKER)
    assert done.returncode == 0, done.stdout
    assert "vLLM 0.32.0+cpu" in done.stdout
    (line,) = [line for line in done.stdout.splitlines() if " Docker " in line.partition("→")[0] and line.startswith("absent")]
    assert "no Docker Engine answers" in line
    assert "only for --launcher docker" in line
    ends(command("doctor", "--clean", **fake_engine, **NO_DOCKER), 3, "class: docker-gone")
    missing = command("doctor", VLLM_QUALIFY_ENGINE=str(tmp_path))
    assert missing.returncode == 3
    assert "MISSING  engine" in missing.stdout
    assert "make setup" in missing.stdout


@contextmanager
def tiny_disk(folder: Path, size: str) -> Iterator[Path]:
    """A real one of so many bytes."""
    folder.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", folder], check=False).returncode:
        # on a desk this user may lack the right; in CI the test has to run
        (pytest.fail if IN_CI else pytest.skip)("this user may not mount a file system of its own")
    try:
        yield folder
    finally:
        # At once, even if something still has a file open there.
        subprocess.run(["umount", "--lazy", folder], check=True)


@pytest.mark.parametrize(
    ("size", "stage", "unclear"),
    [("4k", "plan", ""), ("12k", "serve", "no hub"), ("96k", "contract", "no hub"), ("192k", "accuracy", "no hub")],
)
def test_a_full_disk_ends_with_3_its_stage_and_where_the_evidence_is(
    tmp_path: Path, fake_engine: dict[str, str], size: str, stage: str, unclear: str
) -> None:
    """The engine's answer is kept if nothing was unclear."""
    if unclear:
        leave_unclear(tmp_path / "engine", unclear)
    store = f"file://{tmp_path}/store"
    with tiny_disk(tmp_path / "small", size) as small:
        done = run(small, COMMAND, "run", "reference", "--establish-baseline", "--store", store, **fake_engine)
    assert done.returncode == 3, done.stderr
    assert f"error (the operator must act): {stage}: " in done.stderr
    assert "No space left on device" in done.stderr
    assert (f"evidence so far: {small}/runs/" in done.stderr) == (stage != "plan")
    assert not list((tmp_path / "store").glob("reports/**/manifest.json"))


# --- recipes


@pytest.mark.parametrize("version", ["0.12.0", "0.33.0"])
def test_a_recipe_that_fits_a_version_ends_with_0(version: str) -> None:
    done = command("recipe", "check", "nemotron-3-nano", "--vllm", version, "--gpu-type", "h200")
    assert done.returncode == 0, done.stderr
    assert f"vLLM {version}, " in done.stdout
    assert done.stdout.rstrip().endswith(": fits, with 1 note"), "it trusts its model's code"


def test_a_recipe_that_does_not_fit_ends_with_1_and_every_problem(tmp_path: Path, document: Document) -> None:
    """The guides' settings for v0.12.0, at a later version."""
    document["gpu_types"]["cpu"] |= {
        "server": {"compilation-config": {"pass_config": {"enable_noop": True}}, "max-num-sequences": 4},
        "environment": {"VLLM_USE_FLASHINFER_MOE_FP8": "1"},
    }
    file = str(write(document, tmp_path / "mine.yaml"))
    done = command("recipe", "check", file, "--vllm", "0.32.0")
    assert done.returncode == 1
    for name in ("enable_noop", "--max-num-sequences", "VLLM_USE_FLASHINFER_MOE_FP8"):
        assert name in done.stdout
    body = json.loads(command("recipe", "check", file, "--vllm", "0.32.0", "--json").stdout)
    kinds = {finding["kind"]: finding["is_problem"] for finding in body["findings"]}
    assert kinds == {"unknown-option": True, "bad-value": True, "unknown-environment": False}
    assert body["fits"] is False


def test_a_filter_that_a_task_does_not_have_ends_with_1_or_before_anything_starts_with_2(
    tmp_path: Path, home: Path, document: Document, run_mine: RunMine
) -> None:
    document["gates"] = [{"metric": "exact_match", "filter": "strict_match", "minimum": 0.5, "unit": "fraction"}]
    problem = "gsm8k has no filter strict_match; it has strict-match, flexible-extract; the nearest is strict-match"
    done = command("recipe", "check", str(write(document, tmp_path / "mine.yaml")), "--vllm", "0.32.0")
    assert done.returncode == 1, done.stderr
    assert f"problem  unknown-filter       {problem}" in done.stdout
    ends(run_mine(), 2, "accuracy", problem)
    assert not list(home.glob("*/*"))


def test_a_run_ends_before_a_server_where_the_recipe_does_not_fit(home: Path, document: Document, run_mine: RunMine) -> None:
    document["gpu_types"]["cpu"]["server"] = {"max-num-sequences": 4}
    problem = ("error (the recipe's author must act): check: ", "has no option --max-num-sequences")
    # The evidence is of the server's start, which went on while the engine was asked.
    drift = "class: recipe-drift; the same thing tried again will end the same way"
    ends(run_mine(), 3, *problem, drift, "evidence so far: ")
    assert nothing_was_published(home)


def test_a_server_is_shown_with_config_file_environment_and_command() -> None:
    options = ("--gpu-type", "b200", "--vllm", "0.12.0", "--profile", "latency")
    done = command("recipe", "show", "llama-4-scout", *options)
    assert done.returncode == 0, done.stderr
    shown = ["# llama-4-scout/nvfp4/b200/latency", "tensor-parallel-size: 4", "docker run", "vllm/vllm-openai:v0.12.0"]
    shown.append("--env VLLM_FLASHINFER_MOE_BACKEND=latency")
    assert [text for text in shown if text not in done.stdout] == []
    assert "moe-backend" not in done.stdout


def test_a_published_recipe_is_imported_checked_and_shown(tmp_path: Path) -> None:
    output = tmp_path / "mine.yaml"
    source = written(published_document("--max-model-len", "8192", env={"PYTHONNOUSERSITE": "1"}), tmp_path)
    gate = ("--exact-match-minimum", "0.5", "--exact-match-filter", "strict-match")
    ends(command("recipe", "import", str(source)), 2, "--exact-match-minimum")
    done = command("recipe", "import", str(source), *gate, "--output", str(output))
    assert done.returncode == 0, done.stderr
    assert "left out the variable PYTHONNOUSERSITE" in done.stderr
    assert command("recipe", "check", str(output), "--vllm", "0.32.0").returncode == 0
    assert "max-model-len: 8192" in command("recipe", "show", str(output), "--gpu-type", "h200").stdout
    ends(command("recipe", "import", str(source), *gate, "--output", str(output)), 2, "there is such a file already")
