"""The words of a published command: what is translated, and what is refused."""

from pathlib import Path

import pytest

from tests.recipe.importing.documents import TRANSLATED, Document, import_words, imported, published_document, written
from vllm_qualify.errors import CallerError
from vllm_qualify.recipe.importing.documents import InexpressibleError
from vllm_qualify.recipe.serving import ServerArguments


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
        (["--api-key", "abc"], "dropped --api-key: "),
        (["--revision", "main", "--tokenizer-revision", "main"], "--revision main became the variant's revision"),
        (["--seed", "1", "--seed", "2"], "--seed is given more than once"),
        (["--max-model-len auto"], "--max-model-len and its value are one word in the source"),
        (["--chat-template", "a.jinja"], "--chat-template names a.jinja, which the image must have"),
    ],
)
def test_what_is_not_taken_word_by_word_is_reported(words: list[str], note: str, tmp_path: Path) -> None:
    (only,) = import_words(tmp_path, *words).notes
    assert (only.startswith("h200: "), note in only, "abc" in only) == (True, True, False)


def test_what_vllm_qualify_sets_is_no_argument_of_the_recipe(tmp_path: Path) -> None:
    words = ["--host", "h", "--port", "1", "--uds", "u", "--served-model-name", "s", "--api-key", "k", "--hf-token", "t"]
    recipe = import_words(tmp_path, *words, "--revision", "abc").recipe
    served = (recipe.gpu_types["h200"].server, recipe.served_model_name, recipe.variants["fp8"].revision)
    assert served == ({}, "s", "abc")


@pytest.mark.parametrize(
    ("words", "names"),
    [
        ([], ["a-model"]),
        (["--served-model-name", "a"], ["a"]),
        (["--served_model_name", "a", "b", "Org/C"], ["a", "b", "Org/C"]),
        (["--served-model-name", "a", "b", "a"], ["a", "b"]),
        (["--served-model-name", "a", "--served-model-name", "b"], ["b"]),
    ],
)
def test_every_published_name_is_kept(words: list[str], names: list[str], tmp_path: Path) -> None:
    recipe = import_words(tmp_path, *words).recipe
    assert [recipe.served_model_name, *recipe.aliases] == names


@pytest.mark.parametrize(
    ("image", "vllm"),
    [
        ("vllm/vllm-openai:v0.25.0", ">=0.25.0"),
        ("docker.io/vllm/vllm-openai:v0.25.0-cu129", ">=0.25.0"),
        ("vllm/vllm-openai-cpu:v0.25", ">=0.25"),
        (f"vllm/vllm-openai:v0.25.0@sha256:{'a' * 64}", ">=0.25.0"),
        *((f"vllm/vllm-openai:{tag}", None) for tag in ("latest", f"nightly-{'4c' * 20}", "v0.25.0rc1", "gemma4-0505-cu129")),
        ("evil/vllm-openai:v0.25.0", None),
        (..., None),
    ],
)
def test_the_published_image_says_the_oldest_vllm_of_json(image: str, vllm: str | None, tmp_path: Path) -> None:
    recipe = imported(written(published_document(docker_image=image), tmp_path)).recipe
    assert recipe.variants["fp8"].vllm == vllm


def test_of_several_images_of_a_variant_the_newest_version_counts(tmp_path: Path) -> None:
    for gpu, version in (("h100", "v0.9.2"), ("h200", "v0.25.0"), ("b200", "v0.22.1")):
        written(published_document(hardware=gpu, docker_image=f"vllm/vllm-openai:{version}"), tmp_path, f"{gpu}.json")
    assert imported(tmp_path).recipe.variants["fp8"].vllm == ">=0.25.0"


@pytest.mark.parametrize("words", [["--model", "Org/A-Model", "--seed", "1"], ["--seed=1", "--model=Org/A-Model"]])
def test_the_model_may_be_an_option(words: list[str], tmp_path: Path) -> None:
    recipe = imported(written(published_document(**argv(*words)), tmp_path)).recipe
    assert recipe.variants["fp8"].model == "Org/A-Model"
    assert recipe.gpu_types["h200"].server == {"seed": 1}


INEXPRESSIBLE: list[tuple[list[str], str]] = [
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
    (["--Seed", "1"], "'--Seed', which is not an option of `vllm serve`"),
    (["--"], "'--', which is not an option of `vllm serve`"),
    (["--middleware", "a", "--middleware", "b"], "--middleware more than once"),
    (["-cc.a=1", "-cc.a.b=1"], "inside something that is not a mapping"),
    (["-cc.a.b=1", "-cc.a=1"], "beside a dotted option inside of it"),
]


def argv(*words: str) -> Document:
    return {"argv": ["vllm", "serve", *words]}


@pytest.mark.parametrize(
    ("changes", "key", "message"),
    [
        ({"deploy_type": "multi_node", "argv": ..., "head_argv": []}, "deploy_type", "multi_node, a deployment on several"),
        ({"deploy_type": "pd_cluster"}, "deploy_type", "pd_cluster, prefill and decode on separate servers"),
        ({"deploy_type": "kv_store_lb"}, "deploy_type", "kv_store_lb, several servers behind a router"),
        ({"deploy_type": "new"}, "deploy_type", "new, a deployment unknown here"),
        ({"node_count": 2}, "node_count", "a deployment on 2 nodes"),
        ({"companions": [{"command": "x"}]}, "companions", "several commands"),
        ({"worker_argv": ["vllm"]}, "worker_argv", "several commands"),
        ({"hardware": "mi300x", "hardware_profile": {"display_name": "MI300X"}}, "hardware", "'mi300x' (MI300X), which is no"),
        ({"hardware": "trillium"}, "hardware", "'trillium', which is not a known GPU type"),
        ({"hardware": "rtx_pro_6000"}, "hardware", "'rtx_pro_6000', which is not a known GPU type"),
        ({"argv": ["vllm-omni", "serve", "a/b"]}, "argv", "the command 'vllm-omni serve'"),
        ({"argv": ["python", "-m", "vllm"]}, "argv", "only `vllm serve` is"),
        (argv(), "argv", "0 models"),
        (argv("a/b", "c/d"), "argv", "2 models"),
        (argv("$MODEL"), "argv", "the placeholder '$MODEL'"),
        (argv("???"), "", "nothing that a name can be made of"),
        ({"env": {"NCCL_SOCKET_IFNAME": "${IFACE}"}}, "argv", "the placeholder '${IFACE}'"),
        ({"env": {"HF_TOKEN": "abc"}}, "", "'HF_TOKEN' names a secret"),
        ({"env": {"a b": "c"}}, "", "not the name of an environment variable"),
        *((argv("a/b", *words), "argv", message) for words, message in INEXPRESSIBLE),
    ],
)
def test_what_a_recipe_cannot_express_is_refused_by_name(changes: Document, key: str, message: str, tmp_path: Path) -> None:
    path = written(published_document(**changes), tmp_path)
    with pytest.raises(InexpressibleError) as refusal:
        imported(path)
    assert message in refusal.value.problem
    assert refusal.value.place == (f"{path}: {key}" if key else str(path))


def test_a_models_own_words_in_angle_brackets_are_no_placeholders(tmp_path: Path) -> None:
    server = import_words(tmp_path, "--reasoning-config.reasoning_start_str", "<think>").recipe.gpu_types["h200"].server
    assert server == {"reasoning-config": {"reasoning_start_str": "<think>"}}


@pytest.mark.parametrize(
    ("document", "key", "message"),
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
    document: object, key: str, message: str, tmp_path: Path
) -> None:
    path = written(document, tmp_path)
    with pytest.raises(CallerError) as error:
        imported(path)
    assert (type(error.value), error.value.place) == (CallerError, f"{path}: {key}")
    assert message in error.value.problem


def test_numbers_in_argv_and_environment_are_their_digits(tmp_path: Path) -> None:
    document = published_document(argv=["vllm", "serve", "a/b", "--seed", 3], env={"OMP_NUM_THREADS": 8})
    serving = imported(written(document, tmp_path)).recipe.gpu_types["h200"]
    assert (serving.server, serving.environment) == ({"seed": 3}, {"OMP_NUM_THREADS": "8"})


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("h200.json", "{", "not valid JSON: Expecting"),
        ("h200.json", "\ufeff{}", "not valid JSON: "),
        ("h200.json", "[" * 100_000, "nested too deeply"),
        ("h200.json", "1" * 5000, "not valid JSON: Exceeds the limit"),
        ("model.yaml", "a: b: c", "not valid YAML: mapping values"),
        ("model.yaml", "a: 1\na: 2", "not valid YAML: "),
        ("model.yaml", "[" * 1000, "nested too deeply"),
        ("model.yaml", "a: 1", "does not lie in models/<org>/"),
    ],
)
def test_what_is_not_json_or_yaml_is_one_error(name: str, text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / name
    path.write_text(text, encoding="utf-8")
    with pytest.raises(CallerError) as error:
        imported(path)
    assert message in error.value.problem
    assert error.value.place == str(path)


@pytest.mark.parametrize(
    ("name", "variant", "message"),
    [("h200.json", None, "No such file"), ("", None, "no published JSON in this folder"), ("", "fp8", "no use for --variant")],
)
def test_a_source_without_documents_is_reported(name: str, variant: str | None, message: str, tmp_path: Path) -> None:
    with pytest.raises(CallerError, match=message):
        imported(tmp_path / name, variant)
