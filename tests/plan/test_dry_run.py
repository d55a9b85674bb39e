"""What `--dry-run` shows: the exact commands, for any GPU type on any machine, held against those of vllm-project/recipes."""

import json
import os
import shlex
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML

from tests.builders.plans import loaded
from tests.builders.seed_recipes import COMMANDS, DIFFERENCES, MODELS, PUBLISHED, RENAMED, SEEDS, needs_published, options_of
from tests.fakes.vllm import make_engine
from tests.recipes import reference, write
from vllm_qualify.engine.provision import Launch
from vllm_qualify.errors import CallerError
from vllm_qualify.plan.choice import Choice
from vllm_qualify.plan.dry_run import scripts
from vllm_qualify.recipe.loading import load_recipe

IMAGE = "vllm/vllm-openai:v0.32.0"
DOCKER = Launch(launcher="docker", image=IMAGE)
GPU_TYPES = ("h100", "h200", "b200")


def parsed(value: Any) -> Any:
    """An option's value as a recipe writes it: a mapping is JSON in the config file."""
    return json.loads(value) if isinstance(value, str) and value.startswith("{") else value


class Script:
    """A script of `--dry-run`, read as a shell would."""

    def __init__(self, text: str) -> None:
        self.text = text
        before, _, rest = text.partition("<<'END'\n")
        written, _, command = rest.partition("\nEND\n")
        self.config_file = shlex.split(before)[-1]
        self.config = {name: parsed(value) for name, value in YAML(typ="safe").load(written).items()}
        self.words = shlex.split(command.replace("\\\n", " "))

    def after(self, option: str) -> list[str]:
        return [after for word, after in zip(self.words, self.words[1:], strict=False) if word == option]

    @property
    def environment(self) -> dict[str, str]:
        return dict(word.split("=", 1) for word in self.after("--env") if "=" in word)


def shown(recipe: str, launch: Launch = DOCKER, port: int | None = None, **choice: str | None) -> list[Script]:
    return [Script(text) for text in scripts(load_recipe(recipe), Choice(**choice), launch, port, Path("/runs"))]


@pytest.mark.parametrize("gpu_type", GPU_TYPES)
@pytest.mark.parametrize("recipe", SEEDS)
def test_a_seed_recipe_is_shown_as_a_docker_command_for_each_profile(recipe: str, gpu_type: str) -> None:
    scripts = shown(recipe, gpu_type=gpu_type)
    whole = load_recipe(recipe).recipe
    chosen = (gpu_type, whole.gpu_types[gpu_type].default_variant)
    # A profile can be for some variants alone.
    profiles = [profile for *cell, profile in whole.cells() if tuple(cell) == chosen]
    assert [script.after("--label")[1].rpartition("/")[2] for script in scripts] == profiles
    for script in scripts:
        assert script.words[:2] == ["docker", "run"]
        gpus = script.config["tensor-parallel-size"]
        assert script.after("--gpus") == [f'"device={",".join(map(str, range(gpus)))}"']
        assert script.words[-3:] == [IMAGE, "--config", "/vllm-qualify/server.yaml"]
        assert f"type=bind,source={script.config_file},target=/vllm-qualify/server.yaml,readonly" in script.after("--mount")
        assert script.after("--publish") == ["127.0.0.1:8000:8000"]
        assert script.after("--shm-size") == [f"{16 * gpus}g"]
        assert script.after("--cap-drop") == ["ALL"]
        assert "--privileged" not in script.words
        assert (script.config["host"], script.config["port"]) == ("0.0.0.0", 8000)


@needs_published
@pytest.mark.parametrize(("model", "gpu_type"), [pair for pair in COMMANDS if pair[1] in GPU_TYPES])
def test_the_docker_command_has_all_that_the_published_one_has(model: str, gpu_type: str) -> None:
    theirs = json.loads((PUBLISHED / model / "hw" / f"{gpu_type}.json").read_text())
    words: list[str] = theirs["docker_argv"]
    place = next(number for number, word in enumerate(words) if word.startswith("vllm/vllm-openai"))
    recipe, variant = MODELS[model]
    for script in shown(recipe, gpu_type=gpu_type, variant=variant):
        assert script.config["model"] == words[place + 1] or variant is None
        for name, value in options_of(["vllm", "serve", *words[place + 1 :]]).items():
            assert name in DIFFERENCES or script.config[name] == value, name
        for name, value in theirs["env"].items():
            assert name in RENAMED or script.environment[name] == value, name
        assert_same_container(script, words[:place], theirs["env"])


def assert_same_container(script: Script, words: list[str], environment: dict[str, str]) -> None:
    """Their `docker run` before the image, but for what ours narrows: all GPUs, --privileged, every interface, all memory."""
    cache = words[words.index("-v") + 1]
    _, target = cache.split(":")
    mounted = f"target={target}/hub/models--{script.config['model'].replace('/', '--')},readonly"
    assert any(mount.endswith(mounted) for mount in script.after("--mount"))
    given = {"-v", cache, "-e", *(f"{name}={value}" for name, value in environment.items())}
    narrowed = {"--gpus", "all", "--privileged", "-p", "8000:8000", "--ipc=host"}
    assert set(words) - given - narrowed == {"docker", "run"}
    assert script.words[:2] == ["docker", "run"]


def test_a_run_of_a_hub_model_gets_its_cache_folder_and_no_token(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_secret_of_mine")
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    script = shown("llama-3.3-70b", gpu_type="h200", profile="balanced")[0]
    folder = f"hub/models--{script.config['model'].replace('/', '--')}"
    mounts = [mount for mount in script.after("--mount") if "server.yaml" not in mount]
    assert mounts == [f"type=bind,source={tmp_path}/{folder},target=/root/.cache/huggingface/{folder},readonly"]
    assert not any(name.startswith("HF_TOKEN") for name in script.after("--env"))
    assert "hf_secret_of_mine" not in script.text
    assert f"hf download {script.config['model']} --revision main" in script.text


def test_a_local_model_is_mounted_read_only_and_no_cache_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HF_TOKEN", raising=False)
    (script,) = shown("reference", gpu_type="cpu")
    assert script.config["model"] == "/vllm-qualify/model"
    folder = load_recipe("reference").path("./reference/model")
    assert f"type=bind,source={folder},target=/vllm-qualify/model,readonly" in script.after("--mount")
    assert not any("huggingface" in mount for mount in script.after("--mount"))
    assert script.after("--gpus") == []


def test_the_port_and_the_memory_limit_are_shown(tmp_path: Path) -> None:
    document = reference()
    document["gpu_types"]["cpu"]["memory_limit_gib"] = 1.5
    (script,) = shown(str(write(document, tmp_path / "mine.yaml")), port=8123, gpu_type="cpu")
    assert script.after("--publish") == ["127.0.0.1:8123:8000"]
    assert script.after("--memory") == ["1536m"]


@pytest.mark.parametrize(("gpu_type", "platform"), [("gb200", "linux/arm64"), ("h200", None)])
def test_the_platform_is_that_of_the_machines_with_such_gpus(gpu_type: str, platform: str | None) -> None:
    here = "linux/arm64" if os.uname().machine == "aarch64" else "linux/amd64"
    assert shown("llama-3.3-70b", gpu_type=gpu_type)[0].after("--platform") == [platform or here]


def test_what_is_resolved_at_the_start_of_a_run_is_said() -> None:
    script = shown("llama-3.3-70b", gpu_type="h200")[0]
    assert f"main becomes the commit behind it and {IMAGE} its digest" in script.text
    digest = "vllm/vllm-openai@sha256:" + "0" * 64
    pinned = shown("reference", Launch(launcher="docker", image=digest), gpu_type="cpu")[0]
    assert "its digest" not in pinned.text
    assert pinned.words[-3] == digest


def test_the_process_launcher_is_shown_with_its_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_QUALIFY_ENGINE", str(make_engine(tmp_path / "engine")))
    script = shown("llama-3.3-70b", Launch(), gpu_type="h200", profile="latency")[0]
    assert script.words[0] == "env"
    assert "CUDA_VISIBLE_DEVICES=0,1,2,3" in script.words
    assert script.words[-4:] == [f"{tmp_path}/engine/bin/vllm", "serve", "--config", script.config_file]
    assert script.config["host"] == "127.0.0.1"


@pytest.mark.parametrize(("starts", "is_shown"), [(2, True), (4, True), (1, False)])
def test_it_says_how_often_the_server_may_be_started(starts: int, is_shown: bool, tmp_path: Path) -> None:
    document = reference()
    document["gpu_types"]["cpu"]["starts"] = starts
    for gates, compares in ((document["gates"], True), (document["gates"][:1], False)):
        document["gates"] = gates
        (script,) = scripts(loaded(document, tmp_path), Choice(gpu_type="cpu"), DOCKER, None, Path("/runs"))
        line = f"# The server is started up to {starts} times, for the gates against the baseline."
        assert (line in script.splitlines()) is (is_shown and compares)


def test_it_warns_of_what_the_models_own_file_does_to_replies(tmp_path: Path) -> None:
    document, choice = reference(), Choice(gpu_type="cpu", variant="bf16")
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "generation_config.json").write_text('{"max_new_tokens": 512}')
    document["variants"]["bf16"]["model"] = str(tmp_path)

    def warnings() -> list[str]:
        (script,) = scripts(loaded(document, tmp_path), choice, DOCKER, None, Path("/runs"), "0.16.0")
        return [line for line in script.splitlines() if line.startswith("# Warning: ")]

    (warning,) = warnings()
    assert "max_new_tokens 512, where vLLM 0.16.0 ends every reply" in warning
    document["gpu_types"]["cpu"]["server"]["generation-config"] = "vllm"
    assert warnings() == []


def test_nothing_is_written(tmp_path: Path) -> None:
    list(scripts(load_recipe("llama-3.3-70b"), Choice(gpu_type="h200"), DOCKER, None, tmp_path / "runs"))
    assert not (tmp_path / "runs").exists()


TENSORRT_LLM = Launch(launcher="docker", image="nvcr.io/nvidia/tensorrt-llm/release:1.3.0rc29", client_image=IMAGE)


def test_tensorrt_llm_is_shown_with_its_own_command() -> None:
    (script,) = shown("llama-3.3-70b", TENSORRT_LLM, gpu_type="h200", variant="trtllm-fp8-draft-8b")
    image = script.words.index(str(TENSORRT_LLM.image))
    assert script.words[image + 1 : image + 4] == ["trtllm-serve", "serve", "nvidia/Llama-3.3-70B-Instruct-FP8"]
    assert script.after("--served_model_name") == ["llama-3.3-70b"]
    assert script.after("--config") == ["/vllm-qualify/server.yaml"]
    assert script.after("--gpus") == ['"device=0"']
    assert script.after("--publish") == ["127.0.0.1:8000:8000"]
    assert script.config["speculative_config"]["speculative_model"] == "meta-llama/Llama-3.1-8B-Instruct"
    # the GPU type's and the profile's arguments are vLLM's
    assert not any("-" in name for name in script.config)


@pytest.mark.parametrize(
    ("launch", "gpu_type", "variant", "message"),
    [
        (DOCKER, "a100", None, "no GPU type 'a100'"),
        (DOCKER, "h100", "nvfp4", "'nvfp4' is for b200, gb200, and not for h100"),
        (Launch(), "h200", "trtllm-fp8", "served from an image only"),
        (TENSORRT_LLM.model_copy(update={"client_image": None}), "h200", "trtllm-fp8", "no image of TensorRT-LLM has"),
    ],
)
def test_a_choice_that_cannot_be_served_is_reported(launch: Launch, gpu_type: str, variant: str | None, message: str) -> None:
    with pytest.raises(CallerError, match=message):
        shown("llama-3.3-70b", launch, gpu_type=gpu_type, variant=variant)


@pytest.mark.parametrize(
    ("tag", "message"),
    [("v0.31.0", "is for vLLM >=0.32, and this is 0.31.0"), ("v0.32.0", ""), ("nightly", "does not say which vLLM it holds")],
)
def test_a_variants_versions_are_held_against_the_images_tag(tmp_path: Path, tag: str, message: str) -> None:
    document = reference()
    document["variants"]["bf16"]["vllm"] = ">=0.32"
    recipe = str(write(document, tmp_path / "mine.yaml"))
    with pytest.raises(CallerError, match=message) if message else nullcontext():
        assert len(shown(recipe, Launch(launcher="docker", image=f"vllm/vllm-openai:{tag}"), gpu_type="cpu")) == 1
