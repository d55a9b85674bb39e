"""Import from vllm-project/recipes: what is translated, what is refused, and that a server gets what is published."""

import json
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from pydantic import JsonValue
from ruamel.yaml import YAML

from vllm_qualify.engine.environment import EngineEnvironment
from vllm_qualify.errors import CallerError
from vllm_qualify.recipe.importing import (
    GPU_TYPES,
    SHORT_FORMS,
    Imported,
    InexpressibleError,
    import_recipe,
    rendered,
    write_recipe,
)
from vllm_qualify.recipe.loading import load_recipe
from vllm_qualify.recipe.model import Environment, Recipe, ServerArguments

# Recipes of vllm-project/recipes with their published commands; not part of this project.
SAMPLES = Path(__file__).parents[3] / "shared" / "data" / "vllm-recipes"
PUBLISHED = SAMPLES / "api"
needs_samples = pytest.mark.skipif(not SAMPLES.is_dir(), reason="samples of vllm-project/recipes are not beside this checkout")

FILES = sorted(PUBLISHED.glob("*/*/hw/*.json"))
OF_OURS = [file for file in FILES if file.stem in GPU_TYPES]
OTHERS = [file for file in FILES if file.stem not in GPU_TYPES]
FOLDERS = sorted(PUBLISHED.glob("*/*"))
Document = dict[str, Any]


def imported(source: Path, variant: str | None = None, published: Path | None = None) -> Imported:
    return import_recipe(
        source, exact_match_minimum=0.8, exact_match_filter="flexible-extract", variant=variant, published=published
    )


def brief(path: Path) -> str:
    return "/".join([*path.parts[-4:-2], path.stem]) if path.suffix else path.name


# What a server gets -------------------------------------------------------------------------------------------------------


def resolved(recipe: Recipe, gpu_type: str) -> tuple[str, ServerArguments, Environment]:
    """Model, server arguments and environment of the imported cell."""
    serving = recipe.gpu_types[gpu_type]
    variant, profile = recipe.variants[serving.default_variant], serving.profiles["balanced"]
    arguments = serving.server | variant.server | profile.server
    return variant.model, arguments, serving.environment | variant.environment | profile.environment


def argv_of(recipe: Recipe, gpu_type: str) -> list[str]:
    """The command that vLLM makes of the recipe's `--config` file, without what vllm-qualify sets itself."""
    model, arguments, _ = resolved(recipe, gpu_type)
    return ["vllm", "serve", model, *(word for name, value in arguments.items() for word in config_words(name, value))]


def config_words(name: str, value: JsonValue) -> list[str]:
    """The words of one key, as docs/recipes.md has them ("Server arguments")."""
    assert value is not False
    if value is True:
        return [f"--{name}"]
    if isinstance(value, list):
        return [f"--{name}", *map(str, value)]
    return [f"--{name}", json.dumps(value) if isinstance(value, dict) else str(value)]


def options_in(argv: list[str]) -> dict[str, list[Any]]:
    """The options of a command that is written out in full; JSON is compared as what it says."""
    options: dict[str, list[Any]] = {}
    for word in argv[3:]:
        if word.startswith("--"):
            assert word not in options
            options[word] = []
        else:
            options[list(options)[-1]].append(json.loads(word) if word.startswith("{") else word)
    return options


@needs_samples
@pytest.mark.parametrize("file", OF_OURS, ids=brief)
def test_a_server_gets_the_published_command_and_environment(file: Path) -> None:
    published = json.loads(file.read_text(encoding="utf-8"))
    result = imported(file)
    argv = argv_of(result.recipe, file.stem)
    assert argv[:3] == published["argv"][:3]
    assert options_in(argv) == options_in(published["argv"])
    assert resolved(result.recipe, file.stem)[2] == published["env"]
    assert result.images == {file.stem: published["docker_image"]}
    assert list(result.recipe.gpu_types) == [file.stem]
    assert result.source == "/".join(file.parts[-4:])


@needs_samples
@pytest.mark.parametrize("file", OTHERS, ids=brief)
def test_hardware_that_is_no_gpu_type_of_ours_is_refused_by_name(file: Path) -> None:
    with pytest.raises(InexpressibleError, match=f"'{file.stem}' .*no GPU type of ours") as refusal:
        imported(file)
    assert refusal.value.place == f"{file}: hardware"


@needs_samples
@pytest.mark.parametrize("folder", FOLDERS, ids=brief)
@pytest.mark.parametrize("inner", ["", "hw"])
def test_a_folder_becomes_one_recipe_with_every_gpu_type(folder: Path, inner: str) -> None:
    result = imported(folder / inner)
    files = {file.stem: file for file in OF_OURS if file.parent.parent == folder}
    assert set(result.recipe.gpu_types) == set(files)
    assert len(result.recipe.variants) == 1
    for gpu_type, file in files.items():
        alone = imported(file).recipe
        assert resolved(result.recipe, gpu_type) == resolved(alone, gpu_type)
    left_out = [note for note in result.notes if note.startswith("left out")]
    assert len(left_out) == len([file for file in OTHERS if file.parent.parent == folder])


def sample_variants() -> Iterator[tuple[Path, str, Path]]:
    """Each YAML sample's variants with the folder of its JSON, which may not be there."""
    for file in sorted(SAMPLES.glob("models/*/*.yaml")):
        document = YAML(typ="safe").load(file.read_text(encoding="utf-8"))
        for name, variant in document["variants"].items():
            own = f"{file.parent.name}/{file.stem}"
            yield file, name, PUBLISHED / (own if name == "default" else variant.get("model_id", own))


@needs_samples
@pytest.mark.parametrize(("file", "variant", "folder"), list(sample_variants()), ids=lambda value: Path(value).name)
def test_yaml_alone_gives_what_the_json_has(file: Path, variant: str, folder: Path, tmp_path: Path) -> None:
    result = imported(file, variant, published=tmp_path).recipe
    assert list(result.variants) == [variant]
    # Some have no JSON here; the JSON that there is has fewer GPU types than taxonomy.yaml by now.
    assert set(result.gpu_types) <= set(GPU_TYPES)
    for published in folder.glob("hw/*.json"):
        if published.stem in GPU_TYPES:
            assert resolved(result, published.stem) == resolved(imported(published).recipe, published.stem)


@needs_samples
@pytest.mark.parametrize(("file", "variant", "folder"), list(sample_variants()), ids=lambda value: Path(value).name)
def test_json_beside_yaml_is_used_and_both_agree(file: Path, variant: str, folder: Path) -> None:
    result = imported(file, variant)
    assert ("/hw/*.json" in result.source) == folder.is_dir()
    assert not [note for note in result.notes if "differs" in note]


@needs_samples
def test_where_yaml_and_json_differ_the_json_is_believed_and_a_note_says_so(tmp_path: Path) -> None:
    shutil.copytree(SAMPLES, tmp_path / "recipes")
    yaml = tmp_path / "recipes/models/openai/gpt-oss-20b.yaml"
    file = tmp_path / "recipes/api/openai/gpt-oss-20b/hw/h200.json"
    document = json.loads(file.read_text())
    document["argv"] += ["--max-num-seqs", "7"]
    document["env"] = {"VLLM_X": "1"}
    file.write_text(json.dumps(document))
    result = imported(yaml)
    assert result.recipe.gpu_types["h200"].server["max-num-seqs"] == 7
    assert "h200: the YAML differs from the JSON, which was believed: max-num-seqs, VLLM_X" in result.notes


@pytest.mark.engine
def test_vllm_reads_the_recipe_as_it_reads_the_published_command(engine: EngineEnvironment, tmp_path: Path) -> None:
    cases = [(argv, dict(options)) for argv, options in TRANSLATED] + [published_case(file) for file in OF_OURS]
    (tmp_path / "cases.json").write_text(json.dumps(cases))
    (tmp_path / "probe.py").write_text(PROBE)
    command = [str(engine.python), str(tmp_path / "probe.py"), str(tmp_path)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert ended.returncode == 0, ended.stderr
    told = json.loads((tmp_path / "told.json").read_text())
    assert told["short forms"] == SHORT_FORMS
    assert told["unlike"] == []


def published_case(file: Path) -> tuple[list[str], ServerArguments]:
    return json.loads(file.read_text())["argv"][3:], resolved(imported(file).recipe, file.stem)[1]


PROBE = """
import json, sys
import yaml
from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.utils.argparse_utils import FlexibleArgumentParser

folder = sys.argv[1]
parser = make_arg_parser(FlexibleArgumentParser(prog="vllm serve"))

def parsed(words):
    options = vars(parser.parse_args(["org/model", *words]))
    del options["config"]
    return repr(sorted(options.items()))

def of_config(options):
    with open(f"{folder}/server.yaml", "w") as file:
        yaml.safe_dump(options, file)
    return parsed(["--config", f"{folder}/server.yaml"])

def short_forms():
    for action in parser._actions:
        long = next(name for name in action.option_strings or ["--"] if name.startswith("--"))
        yield from ((name, long) for name in action.option_strings if not name.startswith("--") and name != "-h")

cases = json.load(open(f"{folder}/cases.json"))
unlike = [words for words, options in cases if parsed(words) != of_config(options)]
json.dump({"short forms": dict(short_forms()), "unlike": unlike}, open(f"{folder}/told.json", "w"))
"""


# Words --------------------------------------------------------------------------------------------------------------------


def published_document(*words: str, **changes: Any) -> Document:
    """The least that a published JSON file has."""
    document: Document = {
        "hardware": "h200",
        "variant": "fp8",
        "node_count": 1,
        "deploy_type": "single_node",
        "env": {},
        "docker_image": "vllm/vllm-openai:latest",
        "argv": ["vllm", "serve", "Org/A-Model", *words],
    }
    return {key: value for key, value in (document | changes).items() if value is not ...}


def written(document: object, folder: Path, name: str = "h200.json") -> Path:
    path = folder / name
    path.write_text(json.dumps(document), encoding="utf-8")
    return path


def import_words(folder: Path, *words: str) -> Imported:
    return imported(written(published_document(*words), folder))


# Every one of them is parsed by vLLM itself too, both ways.
TRANSLATED: list[tuple[list[str], ServerArguments]] = [
    ([], {}),
    (["--trust-remote-code"], {"trust-remote-code": True}),
    (["--max-num-seqs", "64"], {"max-num-seqs": 64}),
    (["--max-num-seqs=64"], {"max-num-seqs": 64}),
    (["--max_num_seqs", "64"], {"max-num-seqs": 64}),
    (["--max-model-len", "-1"], {"max-model-len": -1}),
    (["--max-model-len", "8k"], {"max-model-len": "8k"}),
    (["--max-model-len", "auto"], {"max-model-len": "auto"}),
    (["--gpu-memory-utilization", "0.8"], {"gpu-memory-utilization": 0.8}),
    (["--gpu-memory-utilization", "0.80"], {"gpu-memory-utilization": "0.80"}),
    (["-tp", "8", "-pp=2"], {"tensor-parallel-size": 8, "pipeline-parallel-size": 2}),
    (["-ep", "-q", "fp8"], {"enable-expert-parallel": True, "quantization": "fp8"}),
    (["-O3"], {"optimization-level": 3}),
    (["-O=1"], {"optimization-level": 1}),
    (["-O", "2"], {"optimization-level": 2}),
    (["--no-enable-prefix-caching"], {"no-enable-prefix-caching": True}),
    (["--enable-prefix-caching", "--no-enable-prefix-caching"], {"no-enable-prefix-caching": True}),
    (["--seed", "1", "--seed", "2"], {"seed": 2}),
    (["--cudagraph-capture-sizes", "1", "2", "4"], {"cudagraph-capture-sizes": [1, 2, 4]}),
    (["--allowed-origins", '["a"]'], {"allowed-origins": '["a"]'}),
    (["--compilation-config", '{"mode": 3}'], {"compilation-config": {"mode": 3}}),
    (["--limit-mm-per-prompt.video", "0"], {"limit-mm-per-prompt": {"video": 0}}),
    (
        ["-cc.pass_config.eliminate_noops=True", "-cc.cudagraph_mode=FULL"],
        {"compilation-config": {"pass_config": {"eliminate_noops": "True"}, "cudagraph_mode": "FULL"}},
    ),
    (
        ["--compilation_config.pass_config.eliminate_noops", "true"],
        {"compilation-config": {"pass_config": {"eliminate_noops": True}}},
    ),
    (["--compilation-config", '{"mode": 3}', "--compilation-config.mode", "0"], {"compilation-config": {"mode": 0}}),
    (["-cc.mode=3", "--compilation-config.cudagraph_mode=FULL"], {"compilation-config": {"cudagraph_mode": "FULL"}}),
    (["-cc.cudagraph_capture_sizes+=1,2"], {"compilation-config": {"cudagraph_capture_sizes": ["1", "2"]}}),
    (["--override-generation-config", '{"temperature": null}'], {"override-generation-config": '{"temperature": null}'}),
    (["--additional-config.a", "2k", "--additional-config.b", "2K"], {"additional-config": {"a": 2000, "b": 2048}}),
    (["--chat-template", ""], {"chat-template": ""}),
]


@pytest.mark.parametrize(("words", "arguments"), TRANSLATED, ids=lambda value: " ".join(value))
def test_words_become_server_arguments(words: list[str], arguments: ServerArguments, tmp_path: Path) -> None:
    recipe = import_words(tmp_path, *words).recipe
    assert recipe.gpu_types["h200"].server == arguments
    assert recipe.variants["fp8"].model == "Org/A-Model"


@pytest.mark.parametrize(
    ("words", "note"),
    [
        (["--host", "gpu7"], "dropped --host gpu7: vllm-qualify chooses where the server listens"),
        (["--port=9000"], "dropped --port 9000"),
        (["--served_model_name", "a", "b"], "dropped --served-model-name a b: the recipe has its own"),
        (["--api-key", "abc"], "dropped --api-key: "),
        (["--revision", "main", "--tokenizer-revision", "main"], "--revision main became the variant's revision"),
        (["--seed", "1", "--seed", "2"], "--seed is given before --seed"),
        (["--max-model-len auto"], "--max-model-len and its value are one word in the source"),
        (["--chat-template", "a.jinja"], "the image must have what --chat-template a.jinja names"),
    ],
)
def test_what_is_not_taken_word_by_word_is_told(words: list[str], note: str, tmp_path: Path) -> None:
    notes = import_words(tmp_path, *words).notes
    assert len(notes) == 1
    assert notes[0].startswith("h200: ")
    assert note in notes[0]
    assert "abc" not in notes[0]


def test_what_vllm_qualify_sets_is_no_argument_of_the_recipe(tmp_path: Path) -> None:
    words = ["--host", "h", "--port", "1", "--uds", "u", "--served-model-name", "s", "--api-key", "k", "--hf-token", "t"]
    recipe = import_words(tmp_path, *words, "--revision", "abc").recipe
    assert recipe.gpu_types["h200"].server == {}
    assert recipe.variants["fp8"].revision == "abc"


@pytest.mark.parametrize("argv", [["--model", "Org/A-Model", "--seed", "1"], ["--seed=1", "--model=Org/A-Model"]])
def test_the_model_may_be_an_option(argv: list[str], tmp_path: Path) -> None:
    recipe = imported(written(published_document(argv=["vllm", "serve", *argv]), tmp_path)).recipe
    assert recipe.variants["fp8"].model == "Org/A-Model"
    assert recipe.gpu_types["h200"].server == {"seed": 1}


# Refusals -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "key", "told"),
    [
        (
            {"deploy_type": "multi_node", "argv": ..., "head_argv": ["vllm"]},
            "deploy_type",
            "multi_node, a deployment on several",
        ),
        ({"deploy_type": "pd_cluster"}, "deploy_type", "pd_cluster, prefill and decode on separate servers"),
        ({"deploy_type": "kv_store_lb"}, "deploy_type", "kv_store_lb, several servers behind a router"),
        ({"deploy_type": "new"}, "deploy_type", "new, a deployment unknown here"),
        ({"node_count": 2}, "node_count", "a deployment on 2 nodes"),
        ({"companions": [{"command": "x"}]}, "companions", "several commands"),
        ({"worker_argv": ["vllm"]}, "worker_argv", "several commands"),
        ({"hardware": "mi300x", "hardware_profile": {"display_name": "MI300X"}}, "hardware", "'mi300x' (MI300X), which is no"),
        ({"hardware": "trillium"}, "hardware", "'trillium', which is no GPU type of ours"),
        ({"hardware": "xeon6"}, "hardware", "'xeon6', which is no GPU type of ours"),
        ({"argv": ["vllm-omni", "serve", "a/b"]}, "argv", "the command 'vllm-omni serve'"),
        ({"argv": ["python", "-m", "vllm"]}, "argv", "only `vllm serve` is"),
        ({"argv": ["vllm", "serve"]}, "argv", "0 models"),
        ({"argv": ["vllm", "serve", "a/b", "c/d"]}, "argv", "2 models"),
        ({"argv": ["vllm", "serve", "$MODEL"]}, "argv", "the placeholder '$MODEL'"),
        ({"argv": ["vllm", "serve", "???"]}, "", "nothing that a name can be made of"),
        ({"env": {"NCCL_SOCKET_IFNAME": "${IFACE}"}}, "argv", "the placeholder '${IFACE}'"),
        ({"env": {"HF_TOKEN": "abc"}}, "", "'HF_TOKEN' names a secret"),
        ({"env": {"a b": "c"}}, "", "not the name of an environment variable"),
    ],
)
def test_what_a_recipe_cannot_express_is_refused_by_name(changes: Document, key: str, told: str, tmp_path: Path) -> None:
    path = written(published_document(**changes), tmp_path)
    with pytest.raises(InexpressibleError) as refusal:
        imported(path)
    assert told in refusal.value.problem
    assert refusal.value.place == (f"{path}: {key}" if key else str(path))


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--nnodes", "2"], "--nnodes: several nodes"),
        (["-n", "2"], "--nnodes: several nodes"),
        (["--headless"], "--headless: several nodes"),
        (["--data-parallel-address", "10.0.0.1"], "--data-parallel-address: several nodes"),
        (["--omni"], "--omni: an omni model"),
        (["--runner", "pooling"], "--runner pooling: a model that answers no completions"),
        (["--config", "a.yaml"], "--config: a configuration file"),
        (["--kv-transfer-config", '{"kv_role": "kv_producer"}'], "prefill and decode on separate servers"),
        (["--kv-transfer-config.kv_connector=NixlConnector"], "prefill and decode on separate servers"),
        (["--chat-template", "/path/to/x.jinja"], "the placeholder '/path/to/'"),
        (["--max-num-seqs", "<N>"], "the placeholder '<N>'"),
        (["--chat-template", "<your template>"], "the placeholder '<your template>'"),
        (["--tokenizer-revision", "main"], "--tokenizer-revision"),
        (["-x", "1"], "the short option '-x'"),
        (["-O", "decode"], "-O takes a level"),
        (["-O.level=3"], "-O takes a level"),
        (["--seed=1", "2"], "one value is needed"),
        (["--compilation-config.mode"], "one value is needed"),
        (["--compilation-config..mode", "1"], "one value is needed"),
        (["--chat-template=-x"], "a value that looks like an option"),
        (["--Seed", "1"], "'--Seed', which is no `vllm serve` option"),
        (["--"], "'--', which is no `vllm serve` option"),
        (["--middleware", "a", "--middleware", "b"], "--middleware more than once"),
        (["-cc.a=1", "-cc.a.b=1"], "inside of what is no mapping"),
        (["-cc.a.b=1", "-cc.a=1"], "beside a dotted option inside of it"),
    ],
)
def test_a_command_that_a_recipe_cannot_express_is_refused_by_name(words: list[str], told: str, tmp_path: Path) -> None:
    with pytest.raises(InexpressibleError) as refusal:
        import_words(tmp_path, *words)
    assert told in refusal.value.problem
    assert refusal.value.place == f"{tmp_path / 'h200.json'}: argv"


def test_a_models_own_words_in_angle_brackets_are_no_placeholders(tmp_path: Path) -> None:
    server = import_words(tmp_path, "--reasoning-config.reasoning_start_str", "<think>").recipe.gpu_types["h200"].server
    assert server == {"reasoning-config": {"reasoning_start_str": "<think>"}}


@pytest.mark.parametrize(
    ("document", "key", "told"),
    [
        ([], "(top level)", "a mapping is needed here, and it is []"),
        ({}, "deploy_type", "a text is needed here, and it is missing"),
        (published_document(hardware=...), "hardware", "missing"),
        (published_document(hardware=3), "hardware", "a text is needed here, and it is 3"),
        (published_document(node_count="1"), "node_count", "a whole number of 1 or more is needed here, and it is '1'"),
        (published_document(node_count=True), "node_count", "and it is True"),
        (published_document(argv=...), "argv", "the command, a list of words, is needed here, and it is missing"),
        (published_document(argv="vllm serve"), "argv", "a list of words"),
        (published_document(argv=["vllm", None]), "argv.1", "a text"),
        (published_document(env=[]), "env", "a mapping"),
        (published_document(env={"A": True}), "env.A", "a text is needed here, and it is True"),
        (published_document(env={"A": 0.5}), "env.A", "a text"),
        (published_document(docker_image={}), "docker_image", "a text"),
        (published_document(variant=[]), "variant", "a text"),
    ],
)
def test_a_document_of_another_form_is_one_error_with_file_and_key(
    document: object, key: str, told: str, tmp_path: Path
) -> None:
    path = written(document, tmp_path)
    with pytest.raises(CallerError) as error:
        imported(path)
    assert not isinstance(error.value, InexpressibleError)
    assert error.value.place == f"{path}: {key}"
    assert told in error.value.problem


def test_numbers_in_argv_and_environment_are_their_digits(tmp_path: Path) -> None:
    document = published_document(argv=["vllm", "serve", "a/b", "--seed", 3], env={"OMP_NUM_THREADS": 8})
    serving = imported(written(document, tmp_path)).recipe.gpu_types["h200"]
    assert (serving.server, serving.environment) == ({"seed": 3}, {"OMP_NUM_THREADS": "8"})


@pytest.mark.parametrize(
    ("name", "text", "told"),
    [
        ("h200.json", "{", "not valid JSON: Expecting"),
        ("h200.json", "\ufeff{}", "not valid JSON: "),
        ("h200.json", "[" * 100_000, "nested too deeply"),
        ("h200.json", "1" * 5000, "not valid JSON: Exceeds the limit"),
        ("model.yaml", "a: b: c", "not valid YAML: mapping values"),
        ("model.yaml", "a: 1\na: 2", "not valid YAML: "),
        ("model.yaml", "[" * 5000, "nested too deeply"),
        ("model.yaml", "a: 1", "does not lie in models/<org>/"),
    ],
)
def test_what_is_not_json_or_yaml_is_one_error(name: str, text: str, told: str, tmp_path: Path) -> None:
    path = tmp_path / name
    path.write_text(text, encoding="utf-8")
    with pytest.raises(CallerError) as error:
        imported(path)
    assert told in error.value.problem
    assert error.value.place == str(path)


def test_no_such_source_and_empty_folder(tmp_path: Path) -> None:
    with pytest.raises(CallerError, match="No such file"):
        imported(tmp_path / "h200.json")
    with pytest.raises(CallerError, match="no published JSON in this folder"):
        imported(tmp_path)
    with pytest.raises(CallerError, match="leave the variant out"):
        imported(tmp_path, "fp8")


# Folders ------------------------------------------------------------------------------------------------------------------


def test_a_folder_leaves_out_what_it_cannot_import_and_says_so(tmp_path: Path) -> None:
    written(published_document(), tmp_path)
    written(published_document(hardware="h100", node_count=2), tmp_path, "h100.json")
    written(published_document(hardware="b200", deploy_type="multi_node"), tmp_path, "b200.json")
    result = imported(tmp_path)
    assert list(result.recipe.gpu_types) == ["h200"]
    assert result.notes == [
        "left out b200.json: a recipe cannot express multi_node, a deployment on several nodes",
        "left out h100.json: a recipe cannot express a deployment on 2 nodes",
    ]


def test_a_folder_of_which_nothing_can_be_imported_gives_the_first_reason(tmp_path: Path) -> None:
    written(published_document(hardware="h100", node_count=2), tmp_path, "h100.json")
    written(published_document(hardware="mi300x"), tmp_path, "mi300x.json")
    with pytest.raises(InexpressibleError, match="a deployment on 2 nodes"):
        imported(tmp_path)


def test_a_broken_file_in_a_folder_is_an_error(tmp_path: Path) -> None:
    written(published_document(), tmp_path)
    (tmp_path / "h100.json").write_text("{")
    with pytest.raises(CallerError, match="not valid JSON"):
        imported(tmp_path)


def test_two_files_for_one_gpu_type_are_an_error(tmp_path: Path) -> None:
    written(published_document(), tmp_path)
    written(published_document(), tmp_path, "again.json")
    with pytest.raises(CallerError, match="several files are for h200"):
        imported(tmp_path)


@pytest.mark.parametrize(
    ("second", "names"), [({"variant": "nvfp4"}, ["nvfp4", "fp8"]), ({}, ["other-model", "a-model"])], ids=["named", "unnamed"]
)
def test_each_model_of_a_folder_is_a_variant(second: Document, names: list[str], tmp_path: Path) -> None:
    written(published_document(), tmp_path)
    other = {"hardware": "b200", "argv": ["vllm", "serve", "Org/Other-Model", "--seed", "1"]}
    written(published_document(**other, **second), tmp_path, "b200.json")
    recipe = imported(tmp_path).recipe
    assert list(recipe.variants) == names
    assert resolved(recipe, "b200") == ("Org/Other-Model", {"seed": 1}, {})
    assert resolved(recipe, "h200") == ("Org/A-Model", {}, {})


# YAML ---------------------------------------------------------------------------------------------------------------------

TAXONOMY: Document = {
    "hardware_profiles": {
        "h200": {"brand": "NVIDIA", "generation": "hopper", "gpu_count": 8, "vram_gb": 1128},
        "b200": {"brand": "NVIDIA", "generation": "blackwell", "gpu_count": 8, "vram_gb": 1440},
        "mi300x": {"brand": "AMD", "generation": "amd", "gpu_count": 8, "vram_gb": 1536},
    }
}
STRATEGIES: Document = {
    "strategies/single_node_tp.yaml": {"deploy_type": "single_node", "parallel_flag": "--tensor-parallel-size"},
    "strategies/single_node_dep.yaml": {
        "deploy_type": "single_node",
        "parallel_flag": "--data-parallel-size",
        "vllm_args": ["--enable-expert-parallel"],
    },
    "strategies/multi_node_tp.yaml": {"deploy_type": "multi_node", "parallel_flag": "--tensor-parallel-size"},
}


def model_document(**changes: Any) -> Document:
    """The least that a model's YAML has; a key like `variants__default__tp` names a place in it."""
    document: Document = {
        "meta": {"tasks": ["text"]},
        "model": {"model_id": "Org/A-Model", "base_args": ["--seed", "1"]},
        "variants": {"default": {"precision": "bf16", "vram_minimum_gb": 100}},
        "compatible_strategies": ["single_node_tp"],
    }
    for path, value in changes.items():
        place = document
        *parents, last = path.split("__")
        for key in parents:
            place = place.setdefault(key, {})
        place[last] = value
    return document


def repository(folder: Path, model: object, taxonomy: object = TAXONOMY) -> Path:
    """A repository with one model; the path of its YAML."""
    files = {"taxonomy.yaml": taxonomy, "models/Org/A-Model.yaml": model} | STRATEGIES
    for name, document in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        YAML(typ="safe").dump(document, folder / name)
    return folder / "models/Org/A-Model.yaml"


@pytest.mark.parametrize(
    ("changes", "h200", "b200"),
    [
        ({}, {"tensor-parallel-size": 1}, {"tensor-parallel-size": 1}),
        ({"variants__default__vram_minimum_gb": 150}, {"tensor-parallel-size": 8}, {"tensor-parallel-size": 1}),
        ({"variants__default__tp": 2}, {"tensor-parallel-size": 2}, {"tensor-parallel-size": 2}),
        ({"variants__default__tp": 99}, {"tensor-parallel-size": 8}, {"tensor-parallel-size": 8}),
        (
            {"strategy_overrides__single_node_tp__tp": {"hopper": 4, "default": 2}},
            {"tensor-parallel-size": 4},
            {"tensor-parallel-size": 2},
        ),
        (
            {"hardware_overrides__nvidia__extra_args": ["--seed", "2"], "hardware_overrides__hopper__extra_args": ["--x"]},
            {"tensor-parallel-size": 1, "x": True},
            {"tensor-parallel-size": 1, "seed": 2},
        ),
        (
            {
                "hardware_overrides__hopper__extra_args": ["--x"],
                "strategy_overrides__single_node_tp__hardware_overrides__hopper__extra_args": ["--y"],
                "strategy_overrides__single_node_tp__hardware_overrides__b200__extra_args": ["--z"],
            },
            {"tensor-parallel-size": 1, "y": True},
            {"tensor-parallel-size": 1, "z": True},
        ),
        (
            {
                "features__a__args": ["--a"],
                "features__a__hardware_overrides__blackwell__args": ["--of-blackwell"],
                "features__b__args": ["--b"],
                "opt_in_features": ["b"],
                "features__c__args": ["--c"],
                "features__c__strategies": ["pd_cluster"],
                "features__d__args": ["--d"],
                "hardware_opt_in_features__b200": ["d"],
            },
            {"tensor-parallel-size": 1, "a": True, "d": True},
            {"tensor-parallel-size": 1, "of-blackwell": True},
        ),
        (
            {
                "default_strategy": "single_node_dep",
                "compatible_strategies": ["single_node_dep"],
                "strategy_overrides__single_node_dep__extra_args": ["--x"],
                "strategy_overrides__single_node_tp__extra_args": ["--y"],
            },
            {"data-parallel-size": 8, "enable-expert-parallel": True, "x": True},
            {"data-parallel-size": 8, "enable-expert-parallel": True, "x": True},
        ),
        (
            {
                "features__spec": {
                    "default_mode": "one",
                    "modes": {
                        "one": {"args": ["--one"], "hardware_overrides": {"hopper": {"args": ["--hopper"]}}},
                        "two": {"args": ["--two"]},
                    },
                },
            },
            {"tensor-parallel-size": 1, "hopper": True},
            {"tensor-parallel-size": 1, "one": True},
        ),
        (
            {
                "features__spec": {"modes": {"two": {"args": ["--two"], "variants": ["default"]}}},
                "opt_in_features": ["spec"],
                "variants__default__default_modes__spec": "two",
            },
            {"tensor-parallel-size": 1, "two": True},
            {"tensor-parallel-size": 1, "two": True},
        ),
    ],
)
def test_yaml_is_put_together_by_gpu_type(changes: Document, h200: Document, b200: Document, tmp_path: Path) -> None:
    recipe = imported(repository(tmp_path, model_document(**changes))).recipe
    assert recipe.gpu_types["h200"].server == {"seed": 1} | h200
    assert recipe.gpu_types["b200"].server == {"seed": 1} | b200


def test_a_later_layer_of_yaml_goes_over_an_earlier_one(tmp_path: Path) -> None:
    layers = {
        "model__base_env": {"A": 1, "B": "base"},
        "variants__default__extra_env": {"B": "variant", "C": "variant"},
        "variants__default__hardware_overrides__h200__extra_env": {"C": "h200"},
        "hardware_overrides__hopper__extra_env": {"D": "hopper"},
        "variants__default__extra_args": ["--seed", "2"],
    }
    serving = imported(repository(tmp_path, model_document(**layers))).recipe.gpu_types["h200"]
    assert serving.environment == {"A": "1", "B": "variant", "C": "h200", "D": "hopper"}
    assert serving.server["seed"] == 2


@pytest.mark.parametrize(
    ("changes", "meant"),
    [
        ({"meta__hardware": {"h200": "unsupported"}}, ["b200"]),
        ({"variants__default__supported_hardware": ["h200"]}, ["h200"]),
        ({"variants__default__precision": "nvfp4"}, ["b200"]),
        (
            {"variants__default__precision": "nvfp4", "variants__default__precision_hardware": {"brand": "NVIDIA"}},
            ["h200", "b200"],
        ),
        ({"variants__default__vram_minimum_gb": 1200}, ["b200"]),
        ({"strategy_min_gpus": {"multi_node_tp": 99, "single_node_tp": 8, "h200": 16}}, ["b200"]),
        ({"strategy_min_gpus": {"h200": {"single_node_tp": 16}}}, ["b200"]),
    ],
)
def test_yaml_has_the_gpu_types_that_the_variant_is_meant_for(changes: Document, meant: list[str], tmp_path: Path) -> None:
    recipe = imported(repository(tmp_path, model_document(**changes))).recipe
    assert set(recipe.gpu_types) == set(meant)


@pytest.mark.parametrize(
    ("changes", "key", "told"),
    [
        ({"meta__tasks": ["omni", "text"]}, "meta.tasks", "an omni model"),
        ({"default_strategy": "other"}, "compatible_strategies", "a model without 'other' from YAML"),
        ({"compatible_strategies": ["multi_node_tp"]}, "compatible_strategies", "a model without 'single_node_tp'"),
        (
            {"default_strategy": "multi_node_tp", "compatible_strategies": ["multi_node_tp"]},
            None,
            "multi_node, a deployment on several nodes",
        ),
        ({"strategy_hardware__single_node_tp": {}}, "strategy_hardware.single_node_tp", "strategy_hardware from YAML"),
        ({"strategy_min_gpus": 16}, "strategy_min_gpus", "16 GPUs on one node of b200, which has 8"),
        ({"strategy_min_gpus__single_node_tp": 9}, "strategy_min_gpus.single_node_tp", "9 GPUs on one node"),
        ({"variants__default__vram_minimum_gb": 2000}, "variants.default.vram_minimum_gb", "weights of 2000 GB on one node"),
        ({"features__spec__modes": {"mtp": {"args": []}}}, "features.spec.modes", "a feature with such modes from YAML"),
        (
            {"features__spec": {"default_mode": "a", "modes": {"a": {"variants": ["fp8"]}}}},
            "features.spec.modes",
            "a feature with such modes from YAML",
        ),
        ({"features__kv__companion": {"command": "x"}}, "features.kv.companion", "a feature with companion"),
        ({"variants__default__supported_hardware": ["mi300x"]}, "variants.default", "meant for no GPU type of ours"),
        ({"model__base_args": ["--omni"]}, "model", "--omni: an omni model"),
    ],
)
def test_yaml_that_cannot_be_put_together_is_refused_by_name(
    changes: Document, key: str | None, told: str, tmp_path: Path
) -> None:
    path = repository(tmp_path, model_document(**changes))
    with pytest.raises(InexpressibleError) as refusal:
        imported(path)
    assert told in refusal.value.problem
    assert refusal.value.place == (f"{path}: {key}" if key else f"{tmp_path / 'strategies/multi_node_tp.yaml'}: deploy_type")


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"meta": []}, "meta"),
        ({"variants": None}, "variants"),
        ({"variants": {"default": 1}}, "variants.default"),
        ({"variants": {1: {}}}, "variants"),
        ({"model__base_args": "--seed 1"}, "model.base_args"),
        ({"model__base_args": [True]}, "model.base_args.0"),
        ({"model__model_id": None}, "model.model_id"),
        ({"model__base_env": {"A": 0.5}}, "model.base_env.A"),
        ({"variants__default__tp": "2"}, "variants.default.tp"),
        ({"variants__default__vram_minimum_gb": "big"}, "variants.default.vram_minimum_gb"),
        ({"features__a": ["--x"]}, "features.a"),
    ],
)
def test_yaml_of_another_form_is_one_error_with_file_and_key(changes: Document, key: str, tmp_path: Path) -> None:
    path = repository(tmp_path, model_document(**changes))
    with pytest.raises(CallerError) as error:
        imported(path)
    assert not isinstance(error.value, InexpressibleError)
    assert error.value.place == f"{path}: {key}"


def test_a_taxonomy_of_another_form_is_an_error_that_names_it(tmp_path: Path) -> None:
    path = repository(tmp_path, model_document(), {"hardware_profiles": {"h200": {"brand": "NVIDIA"}}})
    with pytest.raises(CallerError) as error:
        imported(path)
    assert error.value.place == f"{tmp_path / 'taxonomy.yaml'}: hardware_profiles.h200.generation"


def test_an_unknown_variant_is_told_with_those_there_are(tmp_path: Path) -> None:
    with pytest.raises(CallerError, match="variants: default"):
        imported(repository(tmp_path, model_document()), "fp4")


def test_json_of_yaml_that_cannot_be_put_together_is_used(tmp_path: Path) -> None:
    path = repository(tmp_path, model_document(default_strategy="single_node_new"))
    (tmp_path / "api/Org/A-Model/hw").mkdir(parents=True)
    written(published_document("-ep", variant="default"), tmp_path / "api/Org/A-Model/hw")
    result = imported(path)
    assert result.recipe.gpu_types["h200"].server == {"enable-expert-parallel": True}
    assert [note for note in result.notes if note.startswith("h200: not compared with the YAML")]


def test_json_of_another_variant_is_not_the_yamls(tmp_path: Path) -> None:
    """Where two recipes have a model of one name, the JSON by that name is only one's."""
    path = repository(tmp_path, model_document(variants__fp8__model_id="Org/Other"))
    (tmp_path / "api/Org/Other/hw").mkdir(parents=True)
    written(published_document(variant="default"), tmp_path / "api/Org/Other/hw")
    assert "json" not in imported(path, "fp8").source


# The recipe ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("minimum", "filter_", "place"),
    [
        (None, "strict-match", "exact_match_minimum"),
        (0.0, "strict-match", "exact_match_minimum"),
        (-1.0, "strict-match", "exact_match_minimum"),
        (1.01, "strict-match", "exact_match_minimum"),
        (float("nan"), "strict-match", "exact_match_minimum"),
        (0.5, None, "exact_match_filter"),
        (0.5, "", "exact_match_filter"),
        (0.5, "strict", "exact_match_filter"),
    ],
)
def test_bound_and_filter_of_the_gate_are_the_callers(
    minimum: float | None, filter_: str | None, place: str, tmp_path: Path
) -> None:
    path = written(published_document(), tmp_path)
    with pytest.raises(CallerError) as error:
        import_recipe(path, exact_match_minimum=minimum, exact_match_filter=filter_)
    assert error.value.place == place


def test_the_gate_is_the_one_given(tmp_path: Path) -> None:
    (gate,) = import_words(tmp_path).recipe.gates
    assert (gate.metric, gate.filter, gate.minimum, gate.unit) == ("exact_match", "flexible-extract", 0.8, "fraction")


@pytest.mark.parametrize(
    ("words", "load"),
    [
        ([], (1024, 64, 320, 1)),
        (["--max-num-seqs", "512"], (1024, 512, 2560, 12)),
        (["--max-num-seqs", "8"], (1024, 8, 40, 0)),
        (["--max-num-seqs", "1k"], (1024, 64, 320, 1)),
        (["--no-enable-prefix-caching"], (1024, 64, 320, 20)),
        (["--max-model-len", "1024"], (480, 64, 320, 1)),
        (["--max-model-len", "8"], (1, 64, 320, 1)),
        (["--max-model-len", "auto"], (1024, 64, 320, 1)),
    ],
)
def test_the_load_fits_the_server(words: list[str], load: tuple[int, int, int, int], tmp_path: Path) -> None:
    recipe = import_words(tmp_path, *words).recipe
    ours = recipe.gpu_types["h200"].profiles["balanced"].load
    assert (ours.input_len, ours.max_concurrency, ours.num_prompts, ours.num_warmups) == load
    assert ours.output_len == ours.input_len


def test_the_written_recipe_loads_and_says_where_it_comes_from(tmp_path: Path) -> None:
    folder = tmp_path / "Org" / "A-Model" / "hw"
    folder.mkdir(parents=True)
    result = imported(written(published_document("--host", "h", env={"A": "1"}), folder))
    path = tmp_path / "recipe.yaml"
    write_recipe(result, path)
    assert load_recipe(str(path)).recipe == result.recipe
    text = path.read_text()
    assert text.startswith("# Imported from vllm-project/recipes: Org/A-Model/hw/h200.json.\n")
    assert "# Published image for h200: vllm/vllm-openai:latest\n" in text
    assert "# - h200: dropped --host h" in text
    assert str(tmp_path) not in text
    assert max(map(len, text.splitlines())) <= 128


def test_a_file_outside_its_place_is_named_without_its_folders(tmp_path: Path) -> None:
    assert imported(written(published_document(), tmp_path)).source == "h200.json"
    assert imported(tmp_path).source == f"{tmp_path.name}/*.json"


def test_a_recipe_is_never_written_over_a_file(tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text("mine")
    with pytest.raises(CallerError, match="such a file already"):
        write_recipe(import_words(tmp_path), path)
    assert path.read_text() == "mine"


@needs_samples
@pytest.mark.parametrize("source", [*OF_OURS, *FOLDERS, *sorted(SAMPLES.glob("models/*/*.yaml"))], ids=brief)
def test_every_imported_sample_loads_again_as_it_was(source: Path, tmp_path: Path) -> None:
    result = imported(source)
    write_recipe(result, tmp_path / "recipe.yaml")
    assert load_recipe(str(tmp_path / "recipe.yaml")).recipe == result.recipe
    assert str(SAMPLES.parent) not in (tmp_path / "recipe.yaml").read_text()


# Anything -----------------------------------------------------------------------------------------------------------------

values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)
names = st.sampled_from(["--seed", "--a.b", "-cc.x", "-tp", "--model", "--revision", "--host", "-O", "--no-a", "--a", "--A_b"])
words = st.one_of(
    names,
    st.builds("{}={}".format, names, st.text(max_size=8)),
    st.text(max_size=8),
    st.sampled_from(
        ["1", "-1", "1e-5", "1k", "on", "true", "null", "{}", '{"a": {"b": [1, null]}}', "[1]", "0x1", "1_0", "\n"]
    ),
    values.map(json.dumps),
)
commands = st.lists(words, max_size=6).map(lambda rest: published_document(*rest))
fuzz = settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def valid_or_one_error(path: Path, published: Path | None = None) -> None:
    """Nothing but a CallerError comes out, or a recipe that is the same once written and loaded."""
    try:
        result = imported(path, published=published)
    except CallerError:
        return
    (path.parent / "recipe.yaml").write_text(rendered(result), encoding="utf-8")
    assert load_recipe(str(path.parent / "recipe.yaml")).recipe == result.recipe
    (path.parent / "recipe.yaml").unlink()


@fuzz
@given(document=commands)
def test_any_command_is_a_valid_recipe_or_one_error(document: Document, tmp_path: Path) -> None:
    valid_or_one_error(written(document, tmp_path))


@fuzz
@given(key=st.sampled_from([*published_document(), "companions", "x"]), value=values)
@example(key="env", value={"A": "\ud800"})
@example(key="docker_image", value="a\nname: b")
@example(key="variant", value="\x85")
def test_any_published_document_is_a_valid_recipe_or_one_error(key: str, value: Any, tmp_path: Path) -> None:
    valid_or_one_error(written(published_document(**{key: value}), tmp_path))


@fuzz
@given(content=st.binary(max_size=40) | st.text(max_size=40).map(lambda text: text.encode("utf-8", "surrogatepass")))
@example(content=b"&a [*a]")
@example(content=b"meta: &a {tasks: *a}")
def test_any_file_is_a_valid_recipe_or_one_error(content: bytes, tmp_path: Path) -> None:
    for name in ("h200.json", "models/Org/A-Model.yaml"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
        with pytest.raises(CallerError):
            imported(path)


places = st.sampled_from(
    [
        *("meta", "meta__tasks", "meta__hardware", "model", "model__base_args", "model__base_env", "model__docker_image"),
        *(
            "variants",
            "variants__default",
            "variants__default__tp",
            "variants__default__extra_args",
            "variants__default__precision",
        ),
        *(
            "features",
            "features__a",
            "features__a__args",
            "opt_in_features",
            "strategy_overrides",
            "hardware_overrides__hopper",
        ),
        *("compatible_strategies", "default_strategy", "variants__default__hardware_overrides", "variants__default__model_id"),
    ]
)


@fuzz
@given(place=places, value=values | st.lists(words, max_size=4))
def test_any_yaml_is_a_valid_recipe_or_one_error(place: str, value: Any, tmp_path: Path) -> None:
    try:
        path = repository(tmp_path, model_document(**{place: value}))
    except UnicodeEncodeError:
        return
    valid_or_one_error(path)


@fuzz
@given(place=st.sampled_from(["brand", "generation", "gpu_count", "vram_gb"]), value=values)
def test_any_taxonomy_is_a_valid_recipe_or_one_error(place: str, value: Any, tmp_path: Path) -> None:
    taxonomy = {"hardware_profiles": {"h200": TAXONOMY["hardware_profiles"]["h200"] | {place: value}}}
    try:
        path = repository(tmp_path, model_document(), taxonomy)
    except UnicodeEncodeError:
        return
    valid_or_one_error(path)
