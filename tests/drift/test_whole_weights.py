"""The engine's own transformers tells that a checkpoint lacks what its model has, and says nothing where it is unsure."""

import json
import subprocess
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from tests.builders.safetensors_files import TENSOR, write_file, write_tensors
from tests.fakes.vllm import make_engine
from tests.report.builder import passed_report
from vllm_qualify.drift import weights_probe, whole_weights
from vllm_qualify.drift.weights_probe import Answer, Loaded, judge
from vllm_qualify.drift.whole_weights import PROBE, check_parameters
from vllm_qualify.engine.environment import EngineEnvironment
from vllm_qualify.engine.server import ServerPlan
from vllm_qualify.errors import ReleaseError
from vllm_qualify.recipe.loading import catalog_folder

TINY = Path(__file__).with_name("tiny_models.py")
WHOLE: Answer = {"lacking": [], "misshapen": [], "unsure": None}
MODELS = ("reference", "reference-chat", "reference-vision")


def served(model: Path, engine: EngineEnvironment, **arguments: Any) -> ServerPlan:
    changes: dict[str, Any] = {"model": str(model), "revision": None, "engine": engine, "arguments": arguments, "parts": []}
    return passed_report().plan.server.model_copy(update=changes)


def ask_probe(engine: EngineEnvironment, folder: Path) -> Answer:
    question = json.dumps({"model": str(folder), "revision": None})
    done = subprocess.run([engine.python, "-I", PROBE, question], capture_output=True, text=True, timeout=300, check=True)
    answer: Answer = json.loads(done.stdout)
    return answer


# --- with the real one


@pytest.mark.engine
@pytest.mark.thorough
def test_a_tensor_of_each_kind_is_missed_and_no_whole_checkpoint_is_accused(engine: EngineEnvironment, tmp_path: Path) -> None:
    done = subprocess.run([engine.python, TINY, PROBE, tmp_path], capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert {name: of["whole"] for name, of in found.items()} == dict.fromkeys(found, WHOLE)
    assert {name: of["untold"] for name, of in found.items()} == {name: [] for name in found}
    assert len(found) == 16
    assert sum(of["tried"] for of in found.values()) > 200


@pytest.mark.engine
@pytest.mark.parametrize("name", MODELS)
def test_the_catalogs_models_are_whole(name: str, engine: EngineEnvironment, tmp_path: Path) -> None:
    assert check_parameters([served(catalog_folder() / name / "model", engine)], tmp_path) == []


@pytest.mark.engine
def test_what_real_checkpoints_have_is_let_pass(engine: EngineEnvironment, tmp_path: Path) -> None:
    """Layers for speculation, which the model does not have; a head that is tied without a word; a tower left out."""
    folder = copy_headers("reference-chat", tmp_path / "more", lambda names: [*names, "model.layers.99.eh_proj.weight"])
    assert ask_probe(engine, folder) == WHOLE
    folder = copy_headers("reference-vision", tmp_path / "text", lambda names: [name for name in names if "vision" not in name])
    answer = ask_probe(engine, folder)
    assert (answer["lacking"], answer["misshapen"]) == ([], [])
    assert "do not match" in str(answer["unsure"])


def copy_headers(name: str, folder: Path, change: Any) -> Path:
    """The model's configuration, and a file with headers of as many tensors of the same shapes, under these names."""
    folder.mkdir()
    model = catalog_folder() / name / "model"
    (folder / "config.json").write_bytes((model / "config.json").read_bytes())
    header = read_header(model / "model.safetensors")
    kept = {each: header.get(each, {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}) for each in change(list(header))}
    written = json.dumps(kept).encode()
    (folder / "model.safetensors").write_bytes(len(written).to_bytes(8, "little") + written)
    return folder


def read_header(path: Path) -> dict[str, Any]:
    body = path.read_bytes()
    header: dict[str, Any] = json.loads(body[8 : 8 + int.from_bytes(body[:8], "little")])
    header.pop("__metadata__", None)
    return header


@pytest.mark.engine
def test_a_model_that_lacks_a_tensor_is_refused(engine: EngineEnvironment, tmp_path: Path) -> None:
    lacking = "model.layers.1.mlp.up_proj.weight"
    folder = copy_headers("reference-chat", tmp_path / "model", lambda names: [name for name in names if name != lacking])
    with pytest.raises(ReleaseError, match=rf"the weights of {folder} are not whole: no tensor gives {lacking}") as raised:
        check_parameters([served(folder, engine)], tmp_path / "answers")
    assert (raised.value.kind, raised.value.place) == ("incomplete-model", "check")


# --- what is not asked, and what is unsure


@pytest.mark.parametrize(
    "arguments",
    [{"load-format": "dummy"}, {"hf-overrides": {"num_hidden_layers": 1}}, {"hf-overrides.a": 1}, {"trust-remote-code": True}],
    ids=str,
)
def test_servers_that_load_otherwise_are_not_asked(arguments: dict[str, Any], tmp_path: Path) -> None:
    assert check_parameters([served(tmp_path, EngineEnvironment(python=tmp_path / "none"), **arguments)], tmp_path) == []


def test_an_engine_that_does_not_say_accuses_nobody(tmp_path: Path) -> None:
    python = make_engine(tmp_path / "engine") / "bin" / "python"
    (unknown,) = check_parameters([served(tmp_path, EngineEnvironment(python=python))], tmp_path / "answers")
    assert unknown == f"whether the weights of {tmp_path} have every parameter of the model: the engine did not answer"


def answering(monkeypatch: pytest.MonkeyPatch, **said: Any) -> list[str]:
    """The probe gives this answer. Returns the models that it is asked about."""
    asked = []

    def answer(server: ServerPlan, _check: object) -> whole_weights.Answer:
        asked.append(server.model)
        return whole_weights.WHOLE.model_copy(update=said)

    monkeypatch.setattr(whole_weights, "_ask_probe", answer)
    return asked


def test_each_model_is_asked_about_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, made_engine: EngineEnvironment
) -> None:
    asked = answering(monkeypatch, misshapen=[("a.weight", [3, 2], [2, 2])])
    server = served(tmp_path, made_engine)
    with pytest.raises(ReleaseError, match=r"a.weight has the shape \[3, 2\], where the model has \[2, 2\]"):
        check_parameters([server, server], tmp_path / "answers")
    assert asked == [str(tmp_path)]


def test_a_whole_model_is_asked_about_again_only_where_it_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, made_engine: EngineEnvironment
) -> None:
    model, cache, asked = tmp_path / "model", tmp_path / "answers", answering(monkeypatch)
    model.mkdir()

    def count_questions(server: ServerPlan) -> int:
        before = len(asked)
        assert check_parameters([server], cache) == []
        assert check_parameters([server], cache) == []
        return len(asked) - before

    def change(name: str, text: str) -> int:
        (model / name).write_text(text)
        return count_questions(served(model, made_engine))

    write_tensors(model / "model.safetensors", "a")
    assert count_questions(served(model, made_engine)) == 1
    assert change("config.json", "{}") == 1
    assert change("model.safetensors.index.json", "{}") == 1
    write_tensors(model / "model.safetensors", "b")
    assert count_questions(served(model, made_engine)) == 1
    write_tensors(model / "other.safetensors", "b")
    assert count_questions(served(model, made_engine)) == 1
    update(made_engine)
    assert count_questions(served(model, made_engine)) == 1
    hub = {"model": "org/model", "revision": "0" * 40}
    assert count_questions(served(model, made_engine).model_copy(update=hub)) == 1
    # A branch may point to another commit tomorrow.
    assert count_questions(served(model, made_engine).model_copy(update=hub | {"revision": "main"})) == 2


@pytest.mark.parametrize("said", [{"unsure": "it is too odd"}, {"lacking": ["a"]}], ids=str)
def test_only_that_a_model_is_whole_is_kept(
    said: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, made_engine: EngineEnvironment
) -> None:
    asked = answering(monkeypatch, **said)
    for _ in range(2):
        with suppress(ReleaseError):
            check_parameters([served(tmp_path, made_engine)], tmp_path / "answers")
    assert len(asked) == 2


@pytest.fixture
def made_engine(tmp_path: Path) -> EngineEnvironment:
    return EngineEnvironment(python=make_engine(tmp_path / "engine") / "bin" / "python")


def update(engine: EngineEnvironment) -> None:
    engine.python.write_text(engine.python.read_text().replace("0" * 64, "1" * 64))


UNSURE = [
    ({"auto_map": {"AutoModel": "m.M"}}, "the model brings code of its own"),
    ({"quantization_config": {"quant_method": "fp8"}}, "the weights are quantized"),
    ({"text_config": {"quantization_config": {"quant_method": "fp8"}}}, "the weights are quantized"),
]


@pytest.mark.parametrize(("config", "told"), UNSURE, ids=str)
def test_what_the_probe_does_not_say(config: dict[str, Any], told: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(weights_probe.UnsureError, match=told):
        weights_probe.answer_about(tmp_path)


def test_weights_in_two_forms_are_unsure(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    for name in ("model", "consolidated"):
        write_tensors(tmp_path / f"{name}.safetensors", "a")
    with pytest.raises(weights_probe.UnsureError, match="two forms"):
        weights_probe.answer_about(tmp_path)


@pytest.mark.parametrize("name", weights_probe.QUANTIZED)
def test_quantized_weights_are_known_by_the_file_beside_them(name: str, tmp_path: Path) -> None:
    write_model(tmp_path, TENSOR)
    (tmp_path / name).write_text('{"bits": 4}')
    with pytest.raises(weights_probe.UnsureError, match="the weights are quantized"):
        weights_probe.answer_about(tmp_path)


@pytest.mark.parametrize("kind", ["F8_E4M3", "I32", "U8", "F4"])
def test_types_that_no_parameter_has_are_unsure(kind: str, tmp_path: Path) -> None:
    write_model(tmp_path, TENSOR | {"dtype": kind})
    with pytest.raises(weights_probe.UnsureError, match=f"tensors of the type {kind}: perhaps the weights are quantized"):
        weights_probe.answer_about(tmp_path)


def write_model(folder: Path, *tensors: dict[str, object]) -> None:
    """A folder whose model has a layer with as many experts."""
    (folder / "config.json").write_text("{}")
    write_file(folder / "model.safetensors", {f"m.mlp.experts.{number}.up": about for number, about in enumerate(tensors)})


OTHER = TENSOR | {"shape": [3, 2]}


@pytest.mark.parametrize(
    ("tensors", "is_joined", "told"),
    [
        # Experts of two kinds, as in ERNIE-4.5-VL.
        ([TENSOR, TENSOR, OTHER, OTHER], True, []),
        ([TENSOR, TENSOR, TENSOR, OTHER], True, []),
        ([TENSOR, TENSOR, TENSOR, OTHER], False, [["m.mlp.experts.3.up", [3, 2], [2, 3]]]),
        ([TENSOR, TENSOR, OTHER, OTHER], False, None),
    ],
)
def test_experts_that_differ_are_told_where_transformers_cannot_join_them(
    tensors: list[dict[str, object]],
    is_joined: bool,
    told: list[object] | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def load(*_: object) -> Loaded:
        if not is_joined:
            raise RuntimeError("some issues during automatic conversion of the weights")
        return Loaded(MadeModel("m.mlp.experts.up"), {"missing_keys": [], "unexpected_keys": [], "mismatched_keys": []})

    write_model(tmp_path, *tensors)
    monkeypatch.setattr(weights_probe, "load_without_memory", load)
    if told is None:
        with pytest.raises(RuntimeError, match="automatic conversion"):
            weights_probe.answer_about(tmp_path)
    else:
        assert weights_probe.answer_about(tmp_path) == WHOLE | {"misshapen": told}


# --- when names are understood


class MadeModel:
    def __init__(self, *names: str) -> None:
        self.names = names

    def state_dict(self) -> dict[str, object]:
        return dict.fromkeys(self.names)

    def named_buffers(self) -> list[tuple[str, object]]:
        return [(name, None) for name in self.names if name.endswith("buffer")]


BUFFERS = [f"layers.{number}.{name}" for number in range(2) for name in ("buffer", "bias_buffer")]
LAYERS = [f"layers.{number}.up.weight" for number in range(3)]


def judged(lacking: list[str], unexpected: list[str], names: list[str]) -> Answer:
    info = {"missing_keys": lacking, "unexpected_keys": unexpected, "mismatched_keys": []}
    return judge(Loaded(MadeModel(*names), info), dict.fromkeys(names))


@pytest.mark.parametrize(
    ("lacking", "unexpected", "told"),
    [
        ([LAYERS[1]], [], [LAYERS[1]]),
        # Another layer has it: its name is understood, whatever else is there.
        ([LAYERS[1]], ["mtp.0.weight"], [LAYERS[1]]),
        (["norm.weight"], [], ["norm.weight"]),
        (["lm_head.weight"], [], []),
        # A buffer that no file has, and one that another layer has there.
        (["layers.0.buffer", "layers.1.buffer"], [], []),
        (["layers.0.bias_buffer"], [], ["layers.0.bias_buffer"]),
    ],
    ids=str,
)
def test_what_is_certain(lacking: list[str], unexpected: list[str], told: list[str]) -> None:
    answer = judged(lacking, unexpected, [*LAYERS, "norm.weight", "lm_head.weight", *BUFFERS])
    assert (answer["lacking"], answer["misshapen"]) == (told, [])


@pytest.mark.parametrize(
    ("lacking", "unexpected"), [(LAYERS, []), (LAYERS, ["blocks.0.up"]), (["norm.weight"], ["final_norm.weight"])], ids=str
)
def test_what_may_have_another_name_is_unsure(lacking: list[str], unexpected: list[str]) -> None:
    with pytest.raises(weights_probe.UnsureError, match="do not match"):
        judged(lacking, unexpected, [*LAYERS, "norm.weight"])


def test_an_expert_that_differs_from_the_others_is_told() -> None:
    names = [f"m.layers.0.mlp.experts.{number}.{part}.weight" for number in range(3) for part in ("up", "down")]
    shapes = {name: ("F32", [4, 2]) for name in names}
    assert weights_probe.odd_expert(shapes) is None
    lacking = {name: about for name, about in shapes.items() if name != names[0]}
    assert (weights_probe.odd_expert(lacking) or {})["lacking"] == [names[0]]
    misshapen = shapes | {names[5]: ("F32", [4, 3])}
    assert (weights_probe.odd_expert(misshapen) or {})["misshapen"] == [[names[5], [4, 3], [4, 2]]]
