"""The chat model on the real engine: it passes its recipe, and each copy with a defect fails what is for it."""

import json
from collections.abc import Callable
from pathlib import Path
from statistics import fmean

import pytest
from ruamel.yaml import YAML

from infra.reference_chat import variants
from tests.builders.chat_model import MODEL, SHORT, Server, recipe
from tests.builders.load_profiles import measured
from tests.directions import CONTRACT
from tests.evidence.contract.server import failing, unknown
from tests.live.tool_questions import questions as tool_questions
from tests.qualified import COMMAND, furnished, of, run, undisturbed
from tests.recipes import Document, write
from vllm_qualify.engine.environment import EngineEnvironment
from vllm_qualify.engine.provision import Launch, find_engines, read_machine
from vllm_qualify.engine.server_start import await_ready, launch
from vllm_qualify.evidence.accuracy.lm_eval_process import prepare_task, running_lm_eval
from vllm_qualify.evidence.accuracy.measurements import parse_task
from vllm_qualify.evidence.accuracy.samples import read_answers
from vllm_qualify.evidence.accuracy.thinking import read_replies
from vllm_qualify.evidence.contract.checks import parse_contract
from vllm_qualify.evidence.contract.measure import measure_contract
from vllm_qualify.evidence.measurement import Measurement
from vllm_qualify.evidence.sequential import Levels
from vllm_qualify.plan.cell import TaskPlan
from vllm_qualify.plan.cells import plan_cells
from vllm_qualify.plan.choice import Choice
from vllm_qualify.recipe.contract import Capability, Contract
from vllm_qualify.recipe.loading import load_recipe
from vllm_qualify.recipe.metrics import AWAKE, PATHS, path_metric
from vllm_qualify.report.model import Report, load_report

pytestmark = [pytest.mark.engine, pytest.mark.usefixtures("engine")]
Reports = dict[str, Report]
EVERY: list[Capability] = ["chat", "tools", "parallel_tools", "reasoning", "json_schema", "responses"]
TOOLS = {"tools_auto", "tools_stream", "parallel_tools", "parallel_tools_stream"}


def asked(
    folder: Path, model: Path, server: Server, contract: Contract | None = None, *, questions: int = 0, calls: int = 0
) -> dict[str, Measurement]:
    """Serve it as a run does, and ask for its contract alone; by default all that the recipe promises.

    Then so many `questions` of its recipe, or so many that want `calls` of tools.
    """
    engines = find_engines(Launch())
    loaded = load_recipe(str(recipe(folder, model, server)))
    (plan,) = plan_cells(loaded, Choice(profile="chats"), engines, read_machine(engines.engine, "cpu"))
    wanted = contract or plan.contract
    assert wanted is not None
    evidence = folder / "contract"
    evidence.mkdir()
    (whole,) = plan.accuracy
    few = whole.settings.model_copy(update={"num_questions": questions, "max_gen_toks": 96})
    task = whole.model_copy(update={"settings": few, "sequential": False})
    task = calling(task, calls, folder) if calls else task
    scored = folder / "accuracy" / task.name
    with launch(plan.server, folder) as starting:
        running = await_ready(plan.server, starting, print)
        measure_contract(running, wanted, plan.smoke.prompt, evidence)
        if questions or calls:
            with running_lm_eval(starting, plan.server.served_model_name, task, folder / "lm-eval") as lm_eval:
                run = prepare_task(running, lm_eval, scored, lambda *_: None)
                run.ask(run.steps[0])
    rows = parse_contract(evidence, wanted, plan.server.served_model_name, plan.server.engine_kind)
    rows += parse_task(scored, task, Levels()) if questions or calls else []
    return {row.metric: row for row in rows}


def calling(task: TaskPlan, calls: int, folder: Path) -> TaskPlan:
    """The task's asking, of questions that want a call each."""
    data = folder / "tools.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in tool_questions(calls)))
    settings = task.settings.model_copy(update={"task": "bfcl_simple", "num_questions": calls, "stop": []})
    return task.model_copy(update={"settings": settings, "questions": [data]})


def said(rows: dict[str, Measurement]) -> dict[str, str]:
    """Why each check that does not hold does not."""
    return {name: row.finding or row.invalid_because or "" for name, row in rows.items() if row.value != 1.0}


@pytest.fixture(scope="module")
def reports(engine: EngineEnvironment, on_a_server: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Reports:
    """The catalog's recipe as it is, run whole: the report of each profile."""
    return qualified("reference-chat", engine, on_a_server, tmp_path_factory, passes=True)


def qualified(
    recipe: str, engine: EngineEnvironment, server: dict[str, str], folders: pytest.TempPathFactory, *, passes: bool
) -> Reports:
    """The report of each profile. Where something else kept the machine busy, all are measured once more.

    A machine that is busy then, too, is no fault: the rest of each report counts.
    """
    home = furnished(folders.mktemp("chat"), folders)
    for _ in range(2):
        done = run(home, COMMAND, "run", recipe, **of(engine), **server)
        # The folders' names begin with their times.
        reports = {each.plan.cell.profile: each for each in map(load_report, sorted((home / "runs").iterdir()))}
        disturbed = [report for report in reports.values() if is_disturbed(report)]
        if not disturbed:
            break
    assert done.returncode == (0 if passes and not disturbed else 1), done.stdout + done.stderr
    return reports


def is_disturbed(report: Report) -> bool:
    """Whether something else kept the machine busy during the load. Raises AssertionError if the load is invalid otherwise."""
    return not undisturbed(measured(report, "load")["prefix_hit_share"])


def test_the_chat_model_keeps_all_that_it_promises(reports: Reports) -> None:
    for report in reports.values():
        rows = measured(report, "contract")
        assert said(rows) == {}
        assert len(rows) == 41


def test_it_passes_chats_of_several_turns_and_a_trace_with_prefix_caching_on(reports: Reports) -> None:
    assert sorted(reports) == ["chats", "traffic"]
    assert {report.outcome for report in reports.values() if not is_disturbed(report)} <= {"passed"}
    # More than with the system's prompt alone; `traffic` cannot hit more than its prompts share.
    for profile, least, most, other in (
        ("chats", 0.55, 1.0, "later_turns_ttft_p50_ms"),
        ("traffic", 0.52, 0.568, "ttft_p50_ms"),
    ):
        report = reports[profile]
        assert not [name for name in report.plan.server.arguments if "prefix" in name]
        gates = {gate.gate.metric: gate.verdict for gate in report.judgement.gates}
        if is_disturbed(report):
            assert {metric for metric, verdict in gates.items() if verdict != "pass"} <= {"prefix_hit_share", other}
            continue
        assert gates["prefix_hit_share"] == gates[other] == "pass"
        hits = measured(report, "load")["prefix_hit_share"]
        assert hits.value is not None
        assert least < hits.value < most


def test_its_answers_are_the_same_on_all_paths(reports: Reports) -> None:
    assert "paths" not in {stage.stage for stage in reports["traffic"].stages}
    rows = measured(reports["chats"], "paths")
    assert said({path: rows[path_metric(path)] for path in PATHS if path != AWAKE}) == {}
    assert rows["path_evicted"].sample_count == 16
    recovered = rows["recovered_after_aborts_s"].value
    assert recovered is not None
    assert 0 < recovered < 10


def test_a_cache_that_forgets_a_chat_before_its_next_turn_fails_the_gate_on_hits(
    engine: EngineEnvironment, on_a_server: dict[str, str], tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Of 71 blocks, eight keep the system's prompt; the other chats take more than the rest between two turns of one."""
    folder = tmp_path_factory.mktemp("forgetful")
    document: Document = YAML(typ="safe").load(recipe(folder, MODEL, {"num-gpu-blocks-override": 72}).read_text())
    serving = document["gpu_types"]["cpu"]
    chats = serving["profiles"]["chats"]
    # Two at once fit.
    chats["load"] |= {"max_concurrency": 2, "num_prompts": 32}
    chats["paths"] = False
    serving["profiles"] = {"chats": chats}
    del document["capabilities"]
    document["accuracy"][0] |= {"num_questions": 40, "sampling": {"temperature": 0.5, "top_p": 0.95}, "samples_per_question": 2}
    document["gates"] = [document["gates"][0] | {"minimum": 0.5}]
    forgetful = str(write(document, folder / "forgetful.yaml"))
    report = qualified(forgetful, engine, on_a_server, tmp_path_factory, passes=False)["chats"]
    verdicts = {gate.gate.metric: gate.verdict for gate in report.judgement.gates}
    assert {metric: verdict for metric, verdict in verdicts.items() if verdict != "pass"} == {"prefix_hit_share": "fail"}
    assert {"exact_match", "later_turns_ttft_p50_ms"} <= verdicts.keys()
    assert_sampled(report, next(tmp_path_factory.getbasetemp().glob(f"*/runs/{report.run_id}/evidence/accuracy/gsm8k")))


def assert_sampled(report: Report, folder: Path) -> None:
    """Each question was asked twice, and the thinking before each answer is kept."""
    (task,) = report.plan.accuracy
    steps = sorted(folder.glob("r*-b*"))
    replies = [reply for step in steps for reply in read_replies(step)]
    assert len(replies) == 80
    assert sum(bool(reply.thinking) for reply in replies) > 40
    by_question: dict[int, list[float]] = {}
    for answer in read_answers(folder, task).answers:
        by_question.setdefault(answer.question, []).append(answer.score("exact_match,strict-match"))
    assert {len(scores) for scores in by_question.values()} == {2}
    row = measured(report, "accuracy")["exact_match"]
    assert row.sample_count == 40
    if row.filter == "strict-match":
        assert row.value == pytest.approx(fmean(map(fmean, by_question.values())))


def nothing(_: Path) -> None:
    """The weights are right; the recipe is wrong."""


def lost_turns_and_wrong_end_token(model: Path) -> None:
    variants.lost_turns(model)
    variants.wrong_end_token(model)


NO_ANSWER: dict[Callable[[Path], None], str] = {
    variants.endless_thinking: "of 8 replies, 8 were cut while still thinking",
    variants.answer_in_thinking: "of 8 replies, 8 ended without an answer after the thinking",
}


@pytest.mark.parametrize(
    ("defect", "server", "capabilities", "own", "others"),
    [
        (variants.broken_template, {}, ["chat"], {"chat_turns"}, set()),
        # One start for two defects, here and for both parsers: what one of them spoils, the other does not.
        (lost_turns_and_wrong_end_token, {}, ["chat"], {"chat", "chat_turns", "chat_end"}, set()),
        (
            nothing,
            {"tool-call-parser": "pythonic", "reasoning-parser": "granite"},
            EVERY,
            TOOLS | {"reasoning", "reasoning_stream", "reasoning_tags"},
            {"tools_required", "tools_named", "tools_text", "tools_again", "json_object", "json_schema"},
        ),
        (
            variants.endless_thinking,
            {},
            ["chat", "reasoning"],
            {"chat_end", "reasoning", "reasoning_stream"},
            {"reasoning_tags"},
        ),
        (variants.answer_in_thinking, {}, ["chat", "reasoning"], {"reasoning", "reasoning_stream"}, {"reasoning_tags"}),
    ],
    ids=["broken-template", "lost-turns-and-wrong-end-token", "wrong-parsers", "endless-thinking", "answer-in-thinking"],
)
def test_a_copy_with_a_defect_fails_the_check_for_it(
    defect: Callable[[Path], None],
    server: Server,
    capabilities: list[Capability],
    own: set[str],
    others: set[str],
    tmp_path: Path,
) -> None:
    model = variants.copied(MODEL, tmp_path / "model")
    defect(model)
    contract = Contract(capabilities=capabilities, not_asked=dict.fromkeys(CONTRACT, "of the whole model's test"))
    why = NO_ANSWER.get(defect, "")
    wrong_parsers = "tool-call-parser" in server
    rows = asked(tmp_path, model, SHORT | server, contract, questions=8 if why else 0, calls=8 if wrong_parsers else 0)
    # Its score is refused, too, and says why; of calls that stayed in the text it is zero.
    scores = {row.metric: rows.pop(row.metric) for row in list(rows.values()) if row.task}
    assert all((score.invalid_because or "").endswith(why) for score in scores.values()), scores
    assert bool(scores) is bool(why or wrong_parsers)
    assert not wrong_parsers or (scores["acc"].value, scores["acc"].sample_count) == (0.0, 8)
    assert unknown(rows) == set(), said(rows)
    assert own <= failing(rows) <= own | others, said(rows)
