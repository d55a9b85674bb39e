"""What a candidate says of recipes: by its table, and by the real vLLM's own code."""

import json
import shutil
import subprocess
import textwrap
from pathlib import Path
from typing import Any

import pytest

from tests.fakes.vllm import leave_unclear, make_engine
from tests.recipes import Document, reference, write
from vllm_qualify.drift import check
from vllm_qualify.drift.asking import PROBE, Subject, ask_candidate
from vllm_qualify.drift.candidate import Candidate, CandidateServer, Device, find_candidate, find_other
from vllm_qualify.drift.check import UNASKED, Checked, check_plans, check_recipe
from vllm_qualify.engine.environment import EngineEnvironment
from vllm_qualify.engine.gpu import detect
from vllm_qualify.engine.image import EngineImage
from vllm_qualify.engine.kinds.registry import KINDS
from vllm_qualify.engine.launchers.base import Script
from vllm_qualify.engine.launchers.docker import DockerLauncher
from vllm_qualify.engine.provision import Engines
from vllm_qualify.errors import CallerError, HostError, RecipeError
from vllm_qualify.plan.cells import plan_cells
from vllm_qualify.plan.choice import Choice, select
from vllm_qualify.plan.server import server_plan
from vllm_qualify.recipe.loading import catalog_names, load_recipe
from vllm_qualify.recipe.recipe import LoadedRecipe
from vllm_qualify.recipe.tables import known_versions, table_of

H200 = Device(name="NVIDIA H200", capability=(9, 0), memory_mib=143_771, count=8)
HOPPER, BLACKWELL = ("h100", "h200"), ("b200", "gb200")
MODEL = str(load_recipe("reference").path("./reference/model"))
SEEDS = ("llama-3.3-70b", "llama-4-scout", "nemotron-3-nano")


def silent(_line: str) -> None:
    pass


def table(version: str = "0.32.0") -> Candidate:
    return find_candidate(version, None, None, silent)


def question(config: str = "{}", device: Device | None = None, **environment: str) -> CandidateServer:
    return CandidateServer(config=config, environment=environment, device=device)


def checked(loaded: LoadedRecipe, candidate: Candidate, cache: Path, **choice: str) -> Checked:
    return check_recipe(loaded, Choice(**choice), candidate, cache)


def recipe_with(folder: Path, server: dict[str, Any], gpu_type: str = "cpu") -> LoadedRecipe:
    document: Document = reference()
    document["gpu_types"]["cpu"]["server"] |= server
    document["gpu_types"] = {gpu_type: document["gpu_types"]["cpu"]}
    return load_recipe(str(write(document, folder / "mine.yaml")))


# --- by a table


@pytest.mark.parametrize("name", SEEDS)
@pytest.mark.parametrize("version", ["0.12.0", known_versions()[-1]])
@pytest.mark.parametrize("gpu_type", [*HOPPER, *BLACKWELL])
def test_the_seed_recipes_fit_the_oldest_and_the_newest_version(name: str, version: str, gpu_type: str, tmp_path: Path) -> None:
    result = checked(load_recipe(name), table(version), tmp_path, gpu_type=gpu_type)
    assert (result.version, result.problems, result.fits) == (version, [], True)
    assert all(each.finding.name.endswith("trust-remote-code") for each in result.findings)
    assert result.unknown == [UNASKED]
    assert len(result.cells) >= 3
    assert all(f"/{gpu_type}/" in cell for cell in result.cells)


CELLS = [f"reference/{variant}/cpu/balanced" for variant in ("bf16", "draft", "ngram", "regressed")]


def test_a_problem_names_its_cells(tmp_path: Path) -> None:
    result = checked(recipe_with(tmp_path, {"max-num-sequences": 4}), table("v0.32.0"), tmp_path)
    (finding,) = result.findings
    assert finding.cells == result.cells == CELLS
    problem, unknown, verdict = result.lines()
    assert (problem[:23], problem[-12:]) == ("problem  unknown-option", "[every cell]")
    assert "a table does not say" in unknown
    assert verdict == "vLLM 0.32.0, 4 cells: does not fit: 1 problem"
    assert json.loads(result.as_json())["findings"][0]["cells"] == finding.cells


def test_a_patch_release_is_judged_for_itself_by_the_table_before_it(tmp_path: Path) -> None:
    result = checked(load_recipe("reference"), table("0.32.5"), tmp_path)
    assert (result.version, result.unknown[0]) == ("0.32.5", "what changed after vLLM 0.32.0, whose table this is")


def test_what_tensorrt_llm_is_not_asked_of_the_contract_is_reported_with_the_reasons(tmp_path: Path) -> None:
    loaded = load_recipe("llama-3.3-70b")
    promises = loaded.recipe.model_copy(update={"capabilities": ["chat", "vision"]})
    left_out = checked(loaded.model_copy(update={"recipe": promises}), table(), tmp_path).left_out
    (asked,) = (reason.partition("contract it is not asked ")[2] for reason in left_out if "'trtllm-fp8' " in reason)
    flat, queue = "its errors are not in an object named `error`", "its metrics page does not count the requests that run"
    assert f"bad_body, unknown_model, vision_broken ({flat}" in asked
    assert f"hang_up ({queue})" in asked


def test_variants_without_a_cell_are_reported(tmp_path: Path) -> None:
    loaded, candidate = load_recipe("llama-3.3-70b"), table("0.12.0")
    left_out = checked(loaded, candidate, tmp_path).left_out
    assert "the variant 'fp8-draft-1b' is for vLLM >=0.15" in left_out
    assert any("'trtllm-fp8' is for TensorRT-LLM" in reason for reason in left_out)
    assert any(reason.endswith("of the API's contract it is asked nothing without 'contract: true'") for reason in left_out)
    with pytest.raises(CallerError, match="for TensorRT-LLM, which does not report"):
        checked(loaded, candidate, tmp_path, variant="trtllm-fp8")


def test_promised_forms_without_a_named_backend_are_noted(tmp_path: Path) -> None:
    document: Document = reference() | {"capabilities": ["chat", "tools"]}
    unnamed = checked(load_recipe(str(write(document, tmp_path / "unnamed.yaml"))), table(), tmp_path)
    (note,) = [each for each in unnamed.findings if each.finding.kind == "unnamed-backend"]
    assert note.cells == unnamed.cells
    assert "`structured-outputs-config: {backend: xgrammar}`" in note.finding.told
    assert unnamed.fits
    document["gpu_types"]["cpu"]["server"]["structured-outputs-config"] = {"backend": "xgrammar"}
    assert checked(load_recipe(str(write(document, tmp_path / "named.yaml"))), table(), tmp_path).findings == []


def test_defaults_are_compared_with_another_version(tmp_path: Path) -> None:
    before = find_other("0.12.0", silent)
    result = check_recipe(load_recipe("nemotron-3-nano"), Choice(gpu_type="h200"), table(), tmp_path, before)
    names = {each.finding.name for each in result.findings}
    assert {"gpu-memory-utilization", "enable-prefix-caching"} <= names
    assert "async-scheduling" not in names, "the recipe sets it"
    assert result.fits


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (("0.32.0", "some/image:v1", None), "--vllm and --image name different engines"),
        (("0.11.0", None, None), "no table of vLLM 0.11.0"),
        (("latest", None, None), "'latest' is not a version"),
        ((None, None, "/no/such/folder"), "no Python at /no/such/folder"),
    ],
)
def test_a_candidate_that_is_none_is_reported(given: tuple[str | None, str | None, str | None], message: str) -> None:
    with pytest.raises(CallerError, match=message):
        find_candidate(*given, silent)


@pytest.mark.parametrize("name", ["/no/such/env", "./none"])
def test_a_folder_that_is_not_there_is_no_image(name: str) -> None:
    with pytest.raises(CallerError, match="there is no Python at") as raised:
        find_other(name, silent)
    assert raised.value.place == "--against"


@pytest.mark.parametrize("choice", [{"gpu_type": "h100"}, {"variant": "fp8"}, {"profile": "turbo"}])
def test_a_choice_of_nothing_is_reported(choice: dict[str, str], tmp_path: Path) -> None:
    (chosen,) = choice.values()
    with pytest.raises(CallerError, match=f"the recipe has nothing of {chosen} for vLLM 0.32.0"):
        checked(load_recipe("reference"), table(), tmp_path, **choice)


def test_a_recipe_for_newer_versions_says_which(tmp_path: Path) -> None:
    document = reference()
    document["variants"] = {"bf16": document["variants"]["bf16"] | {"vllm": ">=0.25"}}
    document["gates"] = document["gates"][:1]
    loaded = load_recipe(str(write(document, tmp_path / "mine.yaml")))
    with pytest.raises(CallerError, match=r"the recipe has nothing for vLLM 0\.20\.0") as raised:
        checked(loaded, table("0.20.0"), tmp_path)
    assert raised.value.remedy == "the variant 'bf16' is for vLLM >=0.25"


def test_code_that_several_gpu_types_run_is_one_note_with_their_cells(tmp_path: Path) -> None:
    document = reference()
    cpu = document["gpu_types"]["cpu"]
    trusting = cpu | {"server": cpu["server"] | {"trust-remote-code": True}}
    document["gpu_types"] = {"cpu": cpu, "h100": trusting, "h200": trusting}
    loaded = load_recipe(str(write(document, tmp_path / "mine.yaml")))
    (problem,) = checked(loaded, table(), tmp_path, variant="bf16").problems
    assert problem.finding.told == "h100, h200 server.trust-remote-code: the model's own Python code runs in the server"
    assert problem.cells == ["reference/bf16/h100/balanced", "reference/bf16/h200/balanced"]
    (elsewhere,) = checked(loaded, table(), tmp_path, variant="bf16", gpu_type="cpu").problems
    assert elsewhere.cells == ["reference/bf16/cpu/balanced"], "a run refuses the whole recipe"


# --- asked, by a stand-in


def subjects(asked: list[CandidateServer], model: Path | None = None) -> list[Subject]:
    """Cells of the reference recipe, with these questions in place of their own."""
    loaded = load_recipe("reference")
    selection = select(loaded, Choice(gpu_type="cpu"), None)
    server = server_plan(loaded, selection, "balanced", EngineEnvironment(python=Path("python3")), "0.32.0", None)
    server = server.model_copy(update={"model": str(model or MODEL)})
    return [Subject(f"cell {number}", server, one) for number, one in enumerate(asked)]


@pytest.fixture
def stand_in(tmp_path: Path) -> Candidate:
    return find_candidate(None, None, str(make_engine(tmp_path / "engine")), silent)


def python_of(candidate: Candidate) -> Path:
    assert isinstance(candidate.engine, EngineEnvironment)
    return candidate.engine.python


def test_an_engine_is_asked_once_for_the_same_question(stand_in: Candidate, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    first = ask_candidate(stand_in, subjects([question()]), cache)
    python_of(stand_in).write_text("#!/bin/sh\nexit 1\n")
    assert ask_candidate(stand_in, subjects([question()]), cache) == first
    with pytest.raises(HostError, match="asking vLLM what it takes ended with exit code 1"):
        ask_candidate(stand_in, subjects([question(A="b")]), cache)


@pytest.mark.thorough
def test_more_servers_than_a_command_can_name_are_asked_in_portions(stand_in: Candidate, tmp_path: Path) -> None:
    asked = [question(json.dumps({"seed": number, "override": "x" * 1000})) for number in range(300)]
    _, judgements = ask_candidate(stand_in, subjects(asked), tmp_path / "cache")
    assert len(judgements) == 300
    assert len(list((tmp_path / "cache").iterdir())) == 4


@pytest.fixture
def asked_in_containers(stand_in: Candidate, monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The configurations in each question that a container is started for."""
    groups: list[list[str]] = []

    def answered(*arguments: object) -> str:
        script = next(each for each in arguments if isinstance(each, Script))
        groups.append([server["config"] for server in json.loads(script.question)["servers"]])
        return subprocess.check_output([python_of(stand_in), "-I", "script.py", script.question], text=True)

    monkeypatch.setattr(DockerLauncher, "ask", answered)
    return groups


@pytest.fixture
def image_stand_in(stand_in: Candidate) -> Candidate:
    image = EngineImage(repository="vllm", tag="v0.32.0", digest=f"sha256:{'0' * 64}", platform="linux/amd64")
    return stand_in.model_copy(update={"engine": image})


@pytest.mark.thorough
def test_a_container_that_holds_a_draft_model_is_asked_about_its_model_alone_too(
    image_stand_in: Candidate, asked_in_containers: list[list[str]], tmp_path: Path
) -> None:
    asked = subjects([question(f"{number}") for number in range(3)])
    changes: list[dict[str, object]] = [{}, {"draft": tmp_path / "draft"}, {"model": str(tmp_path / "other")}]
    changed = [one._replace(server=one.server.model_copy(update=change)) for one, change in zip(asked, changes, strict=True)]
    ask_candidate(image_stand_in, changed, tmp_path / "cache")
    assert asked_in_containers == [["0", "1"], ["2"]]


@pytest.mark.thorough
def test_a_container_is_not_asked_again_about_the_same_model_in_another_folder(
    image_stand_in: Candidate, asked_in_containers: list[list[str]], tmp_path: Path
) -> None:
    shutil.copytree(MODEL, tmp_path / "model")
    for model in (Path(MODEL), tmp_path / "model"):
        ask_candidate(image_stand_in, subjects([question()], model), tmp_path / "cache")
    assert asked_in_containers == [["{}"]]
    (tmp_path / "model" / "config.json").write_text("{}")
    ask_candidate(image_stand_in, subjects([question()], tmp_path / "model"), tmp_path / "cache")
    assert len(asked_in_containers) == 2


@pytest.mark.thorough
def test_another_model_other_packages_or_other_variables_are_another_question(
    stand_in: Candidate, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache, model = tmp_path / "cache", tmp_path / "model"
    shutil.copytree(MODEL, model)

    def count_after_asking(candidate: Candidate = stand_in) -> int:
        ask_candidate(candidate, subjects([question()], model), cache)
        return len(list(cache.glob("*.json")))

    assert count_after_asking() == 1
    (model / "config.json").write_text("{}")
    assert count_after_asking() == 2
    assert count_after_asking(stand_in.model_copy(update={"key": "another transformers"})) == 3
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "1")
    assert count_after_asking() == 4
    # Ours say nothing to vLLM.
    monkeypatch.setenv("VLLM_QUALIFY_HOST", "another")
    assert count_after_asking() == 4


def test_an_answer_about_a_branch_of_the_hub_is_not_kept(stand_in: Candidate, tmp_path: Path) -> None:
    (subject,) = subjects([question()])
    for revision, kept in (("main", 0), ("0" * 40, 1)):
        server = subject.server.model_copy(update={"model": "some/model", "revision": revision})
        ask_candidate(stand_in, [subject._replace(server=server)], tmp_path / "cache")
        assert len(list(tmp_path.glob("cache/*"))) == kept


def test_an_answer_that_leaves_something_open_is_not_kept(stand_in: Candidate, tmp_path: Path) -> None:
    leave_unclear(tmp_path / "engine", "no hub\nand more")
    result = checked(load_recipe("reference"), stand_in, tmp_path / "cache")
    assert result.unknown == ["whether options refuse each other, for 4 of 4 cells: no hub"]
    assert result.fits is None, "there is no finding, and not everything could be checked"
    *_, verdict = result.lines()
    assert verdict == "vLLM 0.32.0+cpu, 4 cells: no problem found, but 4 cells not judged to the end: see what is unknown"
    assert json.loads(result.as_json())["fits"] is None
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize(
    ("answer", "message"),
    [("echo why; exit 1", "exit code 1"), ("echo nonsense", "did not report what it knows"), ("exit 0", "did not report")],
)
def test_a_python_that_does_not_tell_is_the_hosts_fault(stand_in: Candidate, tmp_path: Path, answer: str, message: str) -> None:
    python_of(stand_in).write_text(f"#!/bin/sh\n{answer}\n")
    with pytest.raises(HostError, match=message):
        ask_candidate(stand_in, [], tmp_path)


def test_a_flow_ends_with_every_problem_named(stand_in: Candidate, tmp_path: Path) -> None:
    loaded = recipe_with(tmp_path, {"max-num-sequences": 4, "compilation-config": {"modes": 3}})
    plans = plan_cells(loaded, Choice(), Engines(engine=EngineEnvironment(python=python_of(stand_in))), detect("cpu"))
    with pytest.raises(RecipeError, match=r"vLLM 0\.32\.0\+cpu does not take what the recipe asks") as raised:
        check_plans(plans, tmp_path / "cache")
    named, log_text = ("no option --max-num-sequences", "no field modes", CELLS[0]), "\n".join(raised.value.log_tail)
    assert (raised.value.kind, [each for each in named if each not in log_text]) == ("recipe-drift", [])


# --- asked, for real


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture
def candidate(engine: EngineEnvironment) -> Candidate:
    return find_candidate(None, None, str(engine.python.parents[1]), silent)


@pytest.mark.engine
def test_vllm_names_what_does_not_go_together(candidate: Candidate, tmp_path: Path) -> None:
    """One question for all: each server is judged apart, on its own platform."""
    draft = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 4}
    cases: list[tuple[dict[str, Any], Device | None, str | None]] = [
        ({}, None, None),
        ({"max-num-batched-tokens": 10, "max-num-seqs": 256}, None, "must be greater than or equal to max_num_seqs"),
        ({"max-num-seqs": "many"}, None, "invalid int value: 'many'"),
        ({}, H200, None),
        ({"async-scheduling": True, "speculative-config": json.dumps(draft)}, H200, "async scheduling is only supported with"),
        ({"speculative-config": json.dumps(draft)}, H200, None),
        ({"tensor-parallel-size": 3}, H200, "must be divisible by tensor parallel size"),
        ({"model": "no-such/model"}, H200, "unclear"),
    ]
    asked = [question(json.dumps({"model": MODEL} | given), device, HF_HUB_OFFLINE="1") for given, device, _ in cases]
    answer, judgements = ask_candidate(candidate, subjects(asked), tmp_path, resolve=True)
    assert (answer.version, answer.build) == ("0.32.0+cpu", "cpu")
    for (given, _, message), judgement in zip(cases, judgements.values(), strict=True):
        if message == "unclear":
            assert (judgement.refused, judgement.parsed, bool(judgement.unclear)) == (None, True, True), given
        elif message is None:
            assert (judgement.refused, judgement.unclear) == (None, None), given
        else:
            assert message in str(judgement.refused), given
    assert answer.resolved["dense"]["max-num-seqs"] == 1024, "as on a GPU"
    assert answer.resolved["hybrid"]["enable-prefix-caching"] is True
    assert answer.table.options == table_of("0.32.0").options


@pytest.mark.engine
def test_every_flag_and_value_of_the_catalog_is_parsed_by_the_real_parser(
    candidate: Candidate, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the hub, vLLM comes as far as to look for the model: the parser and the option's own types are behind it.

    All recipes are in one question: vLLM is imported as often for one of them.
    """
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    servers = {name: list(check._make_subjects(load_recipe(name), Choice(), candidate, [])) for name in catalog_names()}
    result = check._check_subjects([subject for each in servers.values() for subject in each], candidate, cache)
    assert result.findings == []
    assert result.unjudged == sum(len(servers[name]) for name in servers if not name.startswith("reference")), "on the hub"
    for unknown in result.unknown:
        assert "outgoing traffic has been disabled" in unknown or "couldn't connect" in unknown


@pytest.mark.engine
def test_what_recipes_say_for_older_versions_is_parsed_too(candidate: Candidate, cache: Path) -> None:
    """Options that only older versions get, as far as this one still has them; the environment of those is by their tables."""
    recipes = [load_recipe(name).recipe for name in catalog_names()]
    servings = [serving for recipe in recipes for serving in recipe.gpu_types.values()]
    variants = [variant for recipe in recipes for variant in recipe.variants.values()]
    layers = [*servings, *variants, *(profile for serving in servings for profile in serving.profiles.values())]
    servers = [entry.server for layer in layers for entry in layer.by_version if entry.server]
    assert {name for server in servers for name in server} == {"async-scheduling", "mamba-ssm-cache-dtype"}
    asked = [question(KINDS["vllm"].text({"model": MODEL, **server}), HF_HUB_OFFLINE="1") for server in servers]
    _, judgements = ask_candidate(candidate, subjects(asked), cache)
    assert {(judgement.parsed, judgement.refused) for judgement in judgements.values()} == {(True, None)}


@pytest.mark.engine
def test_a_cpu_build_only_doubts_what_is_for_gpus(candidate: Candidate, tmp_path: Path) -> None:
    loaded = recipe_with(tmp_path, {"max-num-batched-tokens": 10, "max-num-seqs": 256}, "h200")
    result = checked(loaded, candidate, tmp_path / "cache")
    (finding,) = result.findings
    assert (finding.finding.kind, result.fits) == ("perhaps-refused", True)
    assert "whose CPU build was asked" in finding.finding.told


@pytest.mark.engine
def test_a_cuda_build_without_a_gpu_tells_the_same(candidate: Candidate, tmp_path: Path) -> None:
    """Such a vLLM finds no platform at all; its version's name is what makes this build take the CPU."""
    script = tmp_path / "probe.py"
    script.write_text(
        textwrap.dedent(f"""
        import importlib.metadata, runpy, sys
        real = importlib.metadata.version
        importlib.metadata.version = lambda name: "0.32.0" if name == "vllm" else real(name)
        sys.argv = ["probe", '{{"servers": [], "resolve": false}}']
        runpy.run_path({str(PROBE)!r}, run_name="__main__")
        """)
    )
    done = subprocess.run([python_of(candidate), "-I", script], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    answer = json.loads(done.stdout)
    assert (answer["version"], answer["build"]) == ("0.32.0", "cuda")
    assert set(answer["options"]) == set(table_of("0.32.0").options)
    assert answer["environment"] == table_of("0.32.0").environment


def test_a_table_does_not_know_whether_a_file_is_there(tmp_path: Path) -> None:
    """models/deepseek-ai/DeepSeek-R1.yaml of vllm-project/recipes names this one, which no wheel of vLLM has."""
    name = "examples/tool_chat_template_deepseekr1.jinja"
    file = checked(recipe_with(tmp_path, {"chat-template": name}), table(), tmp_path)
    assert (file.fits, file.problems, file.unjudged) == (None, [], len(file.cells))
    assert f"{name}, which --chat-template names" in file.unknown[0]
    assert checked(recipe_with(tmp_path, {"chat-template": "{{ messages }}"}), table(), tmp_path).fits is True
