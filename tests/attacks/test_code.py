"""A recipe from outside that would run code, send secrets elsewhere, or have another model served than it says."""

import os
import subprocess
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from flows.fleet import Requalify, WatchReleases, qualification
from tests.builders.processes import until
from tests.evidence.commands import STARTING
from tests.fakes.vllm import make_engine
from tests.qualified import COMMAND, run
from tests.recipe.importing.documents import model_document, published_document, repository, written
from tests.recipes import Document, reference, write
from vllm_qualify.engine.confinement import NAMESPACES
from vllm_qualify.engine.environment import EngineEnvironment
from vllm_qualify.engine.gpu import Fingerprint
from vllm_qualify.engine.provision import Engines
from vllm_qualify.errors import CallerError, RecipeError
from vllm_qualify.evidence.accuracy.lm_eval_process import running_lm_eval
from vllm_qualify.plan import cells
from vllm_qualify.plan.cell import CellPlan
from vllm_qualify.plan.cells import plan_cells, unconfined_code, unisolated_code
from vllm_qualify.plan.choice import Choice
from vllm_qualify.recipe.code import check_allowed, code_of, openings_of
from vllm_qualify.recipe.loading import catalog_folder, catalog_names, load_recipe
from vllm_qualify.releases.known import Sighting
from vllm_qualify.releases.source import ImageSource
from vllm_qualify.runs.request import QualifyRelease

CPU = Fingerprint(gpu_type="cpu", name="Some CPU", count=2, memory_mib=8192)
LIMIT_S = 120.0
GATE = ("--exact-match-minimum", "0.8", "--exact-match-filter", "flexible-extract")
TASK = """\
task: own
dataset_path: json
dataset_kwargs: {data_files: {test: TEST}}
test_split: test
output_type: generate_until
doc_to_text: "{{question}}"
doc_to_target: "{{answer}}"
metric_list: [{metric: exact_match}]
"""
# Confined, it cannot leave the file, and only its words tell that it ran.
TAKEN = """\
import contextlib, pathlib
print("taken over")
with contextlib.suppress(OSError):
    pathlib.Path(__file__).with_name("taken").touch()

def same(docs):
    return docs
"""


def command(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return run(Path(os.environ["VLLM_QUALIFY_HOME"]), COMMAND, *arguments, **environment)


def given(document: Document, folder: Path) -> str:
    return str(write(document, folder / "recipe.yaml"))


# --- the environment

LAYERS: dict[str, list[Any]] = {
    "gpu_type": ["gpu_types", "cpu"],
    "variant": ["variants", "bf16"],
    "profile": ["gpu_types", "cpu", "profiles", "balanced"],
    "by_version": ["gpu_types", "cpu", "by_version", 0],
}


def with_environment(names: dict[str, str], layer: str) -> Document:
    document = place = reference()
    if layer == "by_version":
        document["gpu_types"]["cpu"]["by_version"] = [{"vllm": ">=0.1"}]
    for key in LAYERS[layer]:
        place = place[key]
    place["environment"] = names
    return document


@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize(
    "name",
    [
        *("HF_ENDPOINT", "HF_HUB_ENDPOINT", "HF_HOME", "HTTPS_PROXY", "https_proxy", "ALL_PROXY", "SSL_CERT_FILE"),
        *("PYTHONWARNINGS", "PYTHONPATH", "PYTHONSTARTUP", "BROWSER", "PATH", "LD_PRELOAD", "LD_LIBRARY_PATH", "BASH_ENV"),
        *("GIT_SSH_COMMAND", "CC", "vllm_plugins", "Vllm_Plugins", "RAY_ADDRESS", "AWS_ENDPOINT_URL", "PIP_INDEX_URL"),
        *("VLLM_MODEL_REDIRECT_PATH", "VLLM_USE_MODELSCOPE", "VLLM_USAGE_STATS_SERVER", "VLLM_RAY_EXTRA_ENV_VARS_TO_COPY"),
    ],
)
def test_no_recipe_sets_what_is_the_hosts(name: str, layer: str, tmp_path: Path) -> None:
    """`HF_ENDPOINT` sent the hub's token to a listener; `PYTHONWARNINGS` with `BROWSER` ran a command of a shell."""
    with pytest.raises(CallerError, match=f"'{name}'.*leave it out") as refused:
        load_recipe(given(with_environment({name: "http://127.0.0.1:9/"}, layer), tmp_path))
    assert "environment" in refused.value.place


def test_no_option_sets_variables_past_the_environment(tmp_path: Path) -> None:
    document = reference()
    trt = {"model": "org/model", "engine": "tensorrt-llm", "server": {"env_overrides": {"HF_ENDPOINT": "http://127.0.0.1:9/"}}}
    document["variants"]["bf16"] = trt
    with pytest.raises(CallerError, match="write them under 'environment'"):
        load_recipe(given(document, tmp_path))


@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize(
    ("name", "value"),
    [
        *((name, "1") for name in ("VLLM_ALLOW_INSECURE_SERIALIZATION", "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD")),
        *(
            (name, "evil")
            for name in (
                *("VLLM_PLUGINS", "VLLM_CACHE_ROOT", "VLLM_DP_MASTER_IP", "NCCL_NET_PLUGIN", "NCCL_TUNER_PLUGIN"),
                *("NCCL_CONF_FILE", "TORCH_EXTENSIONS_DIR", "TORCH_ADDR2LINE_BINARY", "TORCHINDUCTOR_CACHE_DIR"),
                *("TORCHINDUCTOR_REDIS_HOST", "TRITON_PTXAS_PATH", "FLASHINFER_CUBINS_REPOSITORY"),
            )
        ),
        ("VLLM_NCCL_SO_PATH", "evil.so"),
        ("VLLM_CUDART_SO_PATH", "evil.so"),
        ("CUDA_INJECTION64_PATH", "evil.so"),
        ("VLLM_LOGGING_CONFIG_PATH", "evil.json"),
        ("TRITON_CACHE_MANAGER", "evil:Manager"),
        ("OMP_TOOL_LIBRARIES", "evil.so"),
        ("VLLM_NOT_KNOWN_YET", "/srv/evil"),
    ],
)
def test_variables_that_load_code_need_permission(name: str, value: str, layer: str, tmp_path: Path) -> None:
    assert_refused(with_environment({name: value}, layer), f"environment.{name}", tmp_path)


def test_variables_that_tune_are_data(tmp_path: Path) -> None:
    tuned = {
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_ALLOW_INSECURE_SERIALIZATION": "0",
        "NCCL_DEBUG": "INFO",
        "CUDA_MODULE_LOADING": "LAZY",
        "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
        "OMP_NUM_THREADS": "4",
        "PYTHONHASHSEED": "0",
    }
    assert code_of(load_recipe(given(with_environment(tuned, "gpu_type"), tmp_path))) == []


OPENINGS: dict[str, Any] = {
    "VLLM_SERVER_DEV_MODE": "1",
    "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "True",
    "enable-elastic-ep": True,
    "enable-fault-tolerance": True,
    "profiler-config": {"profiler": "cuda"},
    "profiler-config.profiler": "torch",
    "profiler": {"profiler": "cuda"},
    "no-enable-elastic-ep": False,
}


@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("name", OPENINGS)
def test_what_lets_a_server_be_changed_after_the_check_needs_permission(name: str, layer: str, tmp_path: Path) -> None:
    """Weights could be replaced, adapters added: the approval would be of a server that is no longer there."""
    document = with_environment({name: OPENINGS[name]} if name.isupper() else {}, layer)
    if not name.isupper():
        place: Any = document
        for key in LAYERS[layer]:
            place = place[key]
        place["server"] = {name: OPENINGS[name]}
    loaded = load_recipe(given(document, tmp_path))
    assert code_of(loaded) == []
    with pytest.raises(CallerError, match="the recipe opens its server") as refused:
        check_allowed(loaded, allow_code=False)
    assert f".{name.partition('.')[0]}: whoever reaches the server may" in refused.value.problem
    assert "--allow-code" in refused.value.remedy
    check_allowed(loaded, allow_code=True)


@pytest.mark.parametrize(
    "setting", [{"enable-elastic-ep": False}, {"no-enable-fault-tolerance": True}, {"profiler-config": {}}]
)
def test_a_server_that_is_kept_shut_needs_none(setting: Document, tmp_path: Path) -> None:
    document = with_environment({"VLLM_SERVER_DEV_MODE": "0", "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "false"}, "gpu_type")
    document["variants"]["bf16"]["server"] = setting
    assert openings_of(load_recipe(given(document, tmp_path))) == []


def test_what_runs_code_and_what_opens_the_server_are_told_apart(tmp_path: Path) -> None:
    document = with_environment({"VLLM_SERVER_DEV_MODE": "1"}, "gpu_type")
    document["variants"]["bf16"]["server"] = {"trust-remote-code": True}
    with pytest.raises(CallerError, match=r"the recipe runs code: .*trust-remote-code.*; it opens its server: .*DEV_MODE"):
        check_allowed(load_recipe(given(document, tmp_path)), allow_code=False)


def test_no_recipe_of_the_catalog_opens_its_server() -> None:
    assert [name for name in catalog_names() if openings_of(load_recipe(name))] == []


def assert_refused(document: Document, message: str, folder: Path) -> None:
    loaded = load_recipe(given(document, folder))
    with pytest.raises(CallerError, match="the recipe runs code") as refused:
        check_allowed(loaded, allow_code=False)
    assert message in refused.value.problem
    assert "--allow-code" in refused.value.remedy
    check_allowed(loaded, allow_code=True)


# --- options

OPTIONS: list[dict[str, Any]] = [
    {"trust-remote-code": True},
    {"trust-remote-code": "true"},
    {"trust-remote": True},
    {"no-trust-remote-code": False},
    *(
        {option: "evil.Thing"}
        for option in (
            *("tool-parser-plugin", "reasoning-parser-plugin", "worker-cls", "worker-extension-cls", "scheduler-cls"),
            *("io-processor-plugin", "distributed-executor-backend", "log-config-file", "tool-server"),
            *("data-parallel-address", "master-addr"),
        )
    ),
    {"logits-processors": ["evil:Thing"]},
    {"middleware": ["evil.Thing"]},
    {"model-class-overrides": {"LlamaForCausalLM": "evil:Thing"}},
    {"speculative-config": {"method": "custom_class", "model": "evil.Thing", "num_speculative_tokens": 1}},
    {"speculative-config": {"model": "evil.Thing", "num_speculative_tokens": 1}},
    {"compilation-config": {"backend": "evil.Thing"}},
    {"compilation-config": '{"backend": "evil.Thing", "level": null}'},
    {"compilation-config.backend": "evil.Thing"},
    {"compilation-config": {"inductor_passes": {"post_grad_custom_post_pass": "evil.thing"}}},
    {"compilation-config": {"inductor_compile_config": {"cpp.cxx": ["", "evil"]}}},
    {"compilation-config": {"cache_dir": "evil"}},
    {"structured-outputs-config": {"reasoning_parser_plugin": "evil.py"}},
    {"kv-transfer-config": {"kv_connector": "Evil", "kv_connector_module_path": "evil"}},
    {"kv-transfer-config": {"kv_connector_extra_config": {"spec_name": "Evil", "spec_module_path": "evil"}}},
    {"kv-transfer-config": {"kv_connector_extra_config": {"secondary_tiers": [{"type": "Evil", "module_path": "evil"}]}}},
    {"ec-transfer-config": {"ec_connector_module_path": "evil"}},
    {"ec-manager-config": {"encoder_cache_manager_cls": "evil.Thing"}},
    {"logging-config": {"pylogging_config_file": "evil.json"}},
    # What is nested too deeply to be read here may hold anything.
    {"compilation-config": 100_000 * "[" + 100_000 * "]"},
]


OPTIONS_OF_TENSORRT_LLM: list[dict[str, Any]] = [
    {"trust_remote_code": True},
    {"custom_tokenizer": "evil.Tokenizer"},
    {"ray_worker_extension_cls": "evil.Extension"},
    {"kv_connector_config": {"connector_module": "evil", "connector_worker_class": "Evil"}},
]


@pytest.mark.parametrize(
    ("engine", "options"),
    [*(("vllm", each) for each in OPTIONS), *(("tensorrt-llm", each) for each in OPTIONS_OF_TENSORRT_LLM)],
    ids=lambda value: str(value)[:100],
)
def test_options_that_load_code_need_permission(engine: str, options: dict[str, Any], tmp_path: Path) -> None:
    document = reference()
    document["variants"]["bf16"] |= {"engine": engine, "server": options}
    assert_refused(document, f"variants.bf16.server.{next(iter(options))}", tmp_path)


def test_options_for_some_versions_and_of_profiles_count_too(tmp_path: Path) -> None:
    document = reference()
    cpu = document["gpu_types"]["cpu"]
    cpu["by_version"] = [{"vllm": ">=0.1", "server": {"middleware": ["evil.A"]}}]
    cpu["profiles"]["balanced"]["server"] = {"scheduler-cls": "evil.B"}
    assert [line.partition(": ")[0] for line in code_of(load_recipe(given(document, tmp_path)))] == [
        "gpu_types.cpu.by_version.0.server.middleware",
        "gpu_types.cpu.profiles.balanced.server.scheduler-cls",
    ]


@pytest.mark.parametrize(
    "options",
    [
        {"trust-remote-code": False, "no-trust-remote-code": True},
        {"reasoning-parser": "qwen3", "tool-call-parser": "hermes", "tokenizer-mode": "mistral", "model-impl": "vllm"},
        {"distributed-executor-backend": "mp", "max-lora-cls-labels": 2, "chat-template": "chat.jinja"},
        {"speculative-config": {"method": "ngram", "num_speculative_tokens": 2}},
        {"compilation-config": {"backend": "inductor", "inductor_compile_config": {"max_autotune": True}}},
    ],
    ids=str,
)
def test_options_that_tune_are_data(options: dict[str, Any], tmp_path: Path) -> None:
    document = reference()
    document["variants"]["bf16"]["server"] = options
    assert code_of(load_recipe(given(document, tmp_path))) == []


# --- the folder of a task


@pytest.fixture
def tasks(tmp_path: Path) -> Path:
    """A task whose function is in a file that it includes."""
    folder = tmp_path / "tasks"
    (folder / "deep").mkdir(parents=True)
    (folder / "test.jsonl").write_text('{"question": "1+1", "answer": "2"}\n' * 4)
    (folder / "own.yaml").write_text(f"include: deep/base\n{TASK}".replace("TEST", str(folder / "test.jsonl")))
    (folder / "deep" / "base").write_text("process_docs: !function evil.same\n")
    (folder / "deep" / "evil.py").write_text(TAKEN)
    return folder


@pytest.fixture
def with_tasks(tasks: Path, tmp_path: Path) -> str:
    document = reference()
    document["accuracy"] = [{"task": "own", "task_folder": str(tasks), "num_questions": 4, "num_fewshot": 0}]
    document["gates"] = [{"metric": "exact_match", "filter": "none", "minimum": 0.1, "unit": "fraction"}]
    return given(document, tmp_path)


@pytest.fixture
def engine(tmp_path: Path) -> Path:
    return make_engine(tmp_path / "engine")


@pytest.mark.thorough
@pytest.mark.parametrize(
    "arguments", [["run"], ["run", "--dry-run"], ["recipe", "check", "--python", "ENGINE"]], ids=["run", "dry run", "check"]
)
def test_anothers_task_runs_nothing(arguments: list[str], with_tasks: str, tasks: Path, engine: Path, tmp_path: Path) -> None:
    given_words = [str(engine) if word == "ENGINE" else word for word in arguments]
    home = str(tmp_path / "home")
    done = command(*given_words, with_tasks, VLLM_QUALIFY_ENGINE=str(engine), VLLM_QUALIFY_HOME=home)
    assert done.returncode == 2, done.stderr
    assert "accuracy.own: deep/base has !function evil.same" in done.stderr
    assert "--allow-code" in done.stderr
    assert not list(tasks.rglob("taken"))


def planned(recipe: str, engine: Path) -> CellPlan:
    engines = Engines(engine=EngineEnvironment(python=engine / "bin" / "python"))
    (plan,) = plan_cells(load_recipe(recipe), Choice(variant="bf16"), engines, CPU)
    return plan


@pytest.mark.thorough
def test_a_permitted_task_reaches_lm_eval_and_the_plan(with_tasks: str, tasks: Path, engine: Path, tmp_path: Path) -> None:
    done = command("run", with_tasks, "--dry-run", "--allow-code", VLLM_QUALIFY_ENGINE=str(engine))
    assert done.returncode == 0, done.stderr
    plan = planned(with_tasks, engine)
    assert not list(tasks.rglob("taken"))
    assert plan.code == [
        "accuracy.own: lm-eval runs what its task_folder says: templates, metrics and functions",
        "accuracy.own: deep/base has !function evil.same",
    ]
    with running_lm_eval(STARTING, "reference", plan.accuracy[0], tmp_path / "lm-eval") as lm_eval:
        assert until(lm_eval.has_task_reply, LIMIT_S)
        lm_eval.check()
        assert "taken over" in lm_eval.process.log.read_text()


def test_a_run_warns_of_code_that_is_not_confined(with_tasks: str, engine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = planned(with_tasks, engine)
    assert unconfined_code(plan) == "code of the model or of the recipe"
    in_a_container = plan.model_copy(update={"fingerprint": CPU.model_copy(update={"confined": True})})
    assert unconfined_code(in_a_container) == ""
    # As on a kernel without Landlock; no test can turn it off.
    monkeypatch.setattr(cells, "can_confine", lambda: False)
    assert unconfined_code(in_a_container) == "code of a task"
    assert unconfined_code(planned("reference", engine)) == ""


def test_a_run_warns_of_code_that_gets_no_namespaces(with_tasks: str, engine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(NAMESPACES, "off")
    plan = planned(with_tasks, engine)
    assert not plan.fingerprint.isolated
    assert unisolated_code(plan) == "code of the model or of the recipe"
    in_a_container = plan.model_copy(update={"fingerprint": CPU.model_copy(update={"isolated": True})})
    assert unisolated_code(in_a_container) == "code of a task"
    assert unisolated_code(planned("reference", engine)) == ""


@pytest.mark.thorough
def test_a_task_is_asked_to_move_files_into_its_folder(with_tasks: str, tasks: Path, engine: Path, tmp_path: Path) -> None:
    elsewhere = (tasks / "test.jsonl").rename(tmp_path / "elsewhere.jsonl")
    (tasks / "own.yaml").write_text(TASK.replace("TEST", str(elsewhere)))
    plan = planned(with_tasks, engine)
    with running_lm_eval(STARTING, "reference", plan.accuracy[0], tmp_path / "lm-eval") as lm_eval:
        assert until(lambda: lm_eval.process.exit_code() is not None, LIMIT_S)
        with pytest.raises(RecipeError, match=f"opens '{elsewhere}', which is closed to it") as refused:
            lm_eval.check()
    assert refused.value.remedy == f"move that file into {tasks}, which lm-eval may read"


def test_a_folder_without_a_function_is_code_too(tasks: Path, with_tasks: str) -> None:
    """lm-eval fills its templates with all of Python within reach, and loads metrics by their name or path."""
    (tasks / "deep" / "base").unlink()
    (tasks / "own.yaml").write_text('task: own\ndoc_to_text: "{{ cycler.__init__.__globals__.os.system(1) }}"\n')
    with pytest.raises(CallerError, match=r"accuracy\.own: lm-eval runs"):
        check_allowed(load_recipe(with_tasks), allow_code=False)


@pytest.mark.thorough
@pytest.mark.parametrize("text", ["a: [", "a: &a [*a]\n", "[" * 100_000, "\0"], ids=["broken", "circle", "deep", "binary"])
def test_a_folder_that_is_not_yaml_is_reported_all_the_same(text: str, tasks: Path, with_tasks: str) -> None:
    (tasks / "other.yaml").write_text(text)
    os.mkfifo(tasks / "pipe.yaml")
    with pytest.raises(CallerError, match=r"pipe\.yaml cannot be read as YAML"):
        check_allowed(load_recipe(with_tasks), allow_code=False)


# --- the catalog, the fleet and the import


@pytest.mark.thorough
def test_the_catalog_needs_no_permission() -> None:
    for name in catalog_names():
        check_allowed(load_recipe(name), allow_code=False)
    done = command("recipe", "check", "nemotron-3-nano", "--vllm", "0.32.0")
    assert done.returncode == 0, done.stdout
    assert "note     trusts-code" in done.stdout
    assert "the model's own Python code runs in the server" in done.stdout


@pytest.mark.thorough
def test_check_by_a_table_lists_code_as_a_problem(tmp_path: Path) -> None:
    document = reference()
    document["variants"]["bf16"]["server"] = {"trust-remote-code": True}
    recipe = given(document, tmp_path)
    done = command("recipe", "check", recipe, "--vllm", "0.32.0")
    assert done.returncode == 1
    assert "problem  runs-code            variants.bf16.server.trust-remote-code:" in done.stdout
    allowed = command("recipe", "check", recipe, "--vllm", "0.32.0", "--allow-code")
    assert allowed.returncode == 0, allowed.stdout
    assert "note     trusts-code" in allowed.stdout


def test_a_copy_of_a_recipe_of_the_catalog_is_from_outside(tmp_path: Path) -> None:
    copy = tmp_path / "nemotron-3-nano.yaml"
    copy.write_text((catalog_folder() / copy.name).read_text())
    with pytest.raises(CallerError, match="trust-remote-code"):
        check_allowed(load_recipe(str(copy)), allow_code=False)


def test_the_fleets_requests_hand_the_permission_on() -> None:
    source = ImageSource(name="vllm/vllm-openai", recipe="reference")
    sighting = Sighting(key="k", identity="sha256:" + "a" * 64, tags=["v0.32.0"], seen_at=datetime.now(UTC))
    for allowed in (False, True):
        watch = WatchReleases(recipes=["reference"], gpu_types=["cpu"], store="file:///s", allow_code=allowed)
        assert qualification(watch, "reference", source, sighting)["allow_code"] is allowed
    for request in (QualifyRelease(recipe="reference"), Requalify(recipes=["reference"])):
        assert not request.allow_code


HOSTILE_WORDS = ("--trust-remote-code", "--reasoning-parser-plugin", "/srv/evil.py", "--middleware", "evil.Thing")


@pytest.mark.thorough
def test_an_import_shows_code_and_writes_nothing(tmp_path: Path) -> None:
    source = written(published_document(*HOSTILE_WORDS, env={"NCCL_NET_PLUGIN": "evil"}), tmp_path)
    output = tmp_path / "out.yaml"
    for arguments in (["--output", str(output)], []):
        done = command("recipe", "import", str(source), *GATE, *arguments)
        assert done.returncode == 2
        assert not output.exists()
        assert done.stdout == ""
        for message in ("trust-remote-code", "reasoning-parser-plugin", "middleware", "NCCL_NET_PLUGIN", "--allow-code"):
            assert message in done.stderr
    done = command("recipe", "import", str(source), *GATE, "--output", str(output), "--allow-code")
    assert done.returncode == 0, done.stderr
    assert "it needs trust: gpu_types.h200.server.trust-remote-code" in done.stderr
    assert load_recipe(str(output)).recipe.gpu_types["h200"].environment == {"NCCL_NET_PLUGIN": "evil"}


def test_an_import_of_variables_of_the_host_is_refused_even_so(tmp_path: Path) -> None:
    source = written(published_document(env={"HF_ENDPOINT": "http://127.0.0.1:9/"}), tmp_path)
    done = command("recipe", "import", str(source), *GATE, "--allow-code")
    assert done.returncode == 2
    assert "'HF_ENDPOINT' is not a variable that a recipe may set" in done.stderr


def test_an_import_of_yaml_shows_code_too(tmp_path: Path) -> None:
    base = {"model__base_args": ["--trust-remote-code"], "model__base_env": {"VLLM_PLUGINS": "evil"}}
    source = repository(tmp_path, model_document(**base))
    done = command("recipe", "import", str(source), *GATE)
    assert done.returncode == 2
    assert "server.trust-remote-code" in done.stderr
    assert "environment.VLLM_PLUGINS" in done.stderr
    assert done.stdout == ""
