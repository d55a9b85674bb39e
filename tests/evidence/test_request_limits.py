"""Requests that a server would refuse by its own limits: told before it starts."""

import json
from pathlib import Path
from typing import Any

import pytest
from packaging.version import Version

from tests.builders.accuracy import draw_picture, exam_row, pictures_plan, refuse_task
from tests.builders.task_recipes import GSM8K, SCORE, loaded, made, problems
from tests.engine.script import run_script
from tests.recipes import Document
from tests.report.builder import passed_report
from vllm_qualify.drift.candidate import find_candidate
from vllm_qualify.drift.check import check_recipe
from vllm_qualify.engine.environment import EngineEnvironment
from vllm_qualify.errors import CallerError
from vllm_qualify.evidence import likelihood, request_limits
from vllm_qualify.evidence.accuracy.checked_tasks import check_planned_tasks, with_tasks
from vllm_qualify.evidence.accuracy.picture_limits import NO_LIMITS, PictureLimits
from vllm_qualify.evidence.contract.measure import MANY
from vllm_qualify.evidence.paths.replies import ALTERNATIVES
from vllm_qualify.evidence.request_limits import VARIABLES, picture_limits
from vllm_qualify.evidence.stages.paths import MOST_AT_ONCE
from vllm_qualify.plan.choice import Choice
from vllm_qualify.recipe.gates import MaxLoss
from vllm_qualify.recipe.searches import Sweep
from vllm_qualify.recipe.tables import known_versions, table_of

CHAT = {"api": "chat", "stop": []}
# Its task file has five texts that end a reply.
CODE = {"task": "made_code", "num_questions": 4, "task_folder": "tasks", "num_fewshot": 0, "max_gen_toks": 64}
CODE_FILE = """\
task: made_code
dataset_path: json
test_split: test
doc_to_text: "{{question}}"
doc_to_target: "{{answer}}"
output_type: generate_until
generation_kwargs: {until: ["\\nclass", "\\ndef", "\\n#", "\\nif", "\\nprint"], max_gen_toks: 64}
metric_list: [{metric: exact_match}]
"""
ANY_SCORE = {"metric": "exact_match", "filter": "none", "minimum": 0.5, "unit": "fraction"}


def refused(
    folder: Path,
    server: dict[str, Any] | None = None,
    environment: dict[str, str] | None = None,
    task: Document = GSM8K,
    gate: Document = SCORE,
    version: str = "0.33.0",
    **more: Any,
) -> list[str]:
    (folder / "tasks").mkdir(exist_ok=True)
    (folder / "tasks" / "code.yaml").write_text(CODE_FILE)
    document = made(server or {}, [task], [gate]) | more
    document["gpu_types"]["h100"]["environment"] = environment or {}
    recipe = loaded(folder, document)
    candidate = find_candidate(version, None, None, lambda _: None)
    given = with_tasks(check_recipe(recipe, Choice(), candidate, folder / "cache"), recipe, Choice())
    return [told for kind, told in problems(given) if kind == "refused-request"]


def test_usual_limits_refuse_nothing(tmp_path: Path) -> None:
    assert refused(tmp_path) == []
    promised: dict[str, Any] = {"capabilities": ["chat", "vision"], "likelihood": {"num_answers": 8}}
    assert refused(tmp_path, {"max-logprobs": -1, "limit-mm-per-prompt": {"image": 2}}, **promised) == []
    assert refused(tmp_path, {"max-num-queued-reqs": 64, "limit-mm-per-prompt": {"video": 0}}, **promised) == []


@pytest.mark.parametrize(
    ("server", "told"),
    [
        ({"max-logprobs": 9}, ["the stage paths asks for 10 log-probabilities of each token, of which max-logprobs allows 9"]),
        (
            {"max-logprobs": 0},
            ["the contract asks for a log-", "the stage paths asks for 10 log-", "the stage likelihood asks for a log-"],
        ),
    ],
    ids=str,
)
def test_more_likelihoods_than_are_allowed(server: dict[str, Any], told: list[str], tmp_path: Path) -> None:
    given = refused(tmp_path, server, likelihood={"num_answers": 8})
    assert [line.startswith(begin) for line, begin in zip(given, told, strict=True)] == [True] * len(told)


def test_a_task_that_compares_likelihoods_needs_them_too(tmp_path: Path) -> None:
    task = {"task": "hellaswag", "num_questions": 4}
    given = refused(tmp_path, {"max-logprobs": 0}, task=task, gate=ANY_SCORE | {"metric": "acc"})
    assert "hellaswag asks for a log-probability, and max-logprobs allows none: vLLM refuses that" in given


def test_more_stop_texts_than_a_version_takes(tmp_path: Path) -> None:
    told = "made_code asks for 5 stop texts, of which VLLM_MAX_STOP_STRINGS allows 4: vLLM refuses that"
    assert refused(tmp_path, task=CODE, gate=ANY_SCORE) == [told]
    assert refused(tmp_path, task=CODE, gate=ANY_SCORE, version="0.27.0") == [], "it had no such limit"
    assert refused(tmp_path, environment={"VLLM_MAX_STOP_STRINGS": "5"}, task=CODE, gate=ANY_SCORE) == []
    assert refused(tmp_path, task=CODE | {"stop": ["\ndef"]}, gate=ANY_SCORE) == []
    # In a chat lm-eval sends the first four.
    assert refused(tmp_path, task=CODE | {"api": "chat"}, gate=ANY_SCORE) == []
    few = refused(tmp_path, environment={"VLLM_MAX_STOP_STRINGS": "3"}, task=CODE | {"api": "chat"}, gate=ANY_SCORE)
    assert few == ["made_code asks for 4 stop texts, of which VLLM_MAX_STOP_STRINGS allows 3: vLLM refuses that"]


def test_two_replies_to_one_request(tmp_path: Path) -> None:
    given = refused(tmp_path, environment={"VLLM_MAX_N_SEQUENCES": "1"})
    assert given == [
        "the contract asks for 2 replies to one request, of which VLLM_MAX_N_SEQUENCES allows 1: vLLM refuses that"
    ]


@pytest.mark.parametrize(
    ("server", "most"),
    [
        ({"limit-mm-per-prompt": {"image": 1}}, 1),
        ({"limit-mm-per-prompt": '{"image": {"count": 0, "width": 64}}'}, 0),
        ({"limit-mm-per-prompt": {"image": {"count": 1}}}, 1),
        ({"limit-mm-per-prompt.image": 1}, 1),
        ({"language-model-only": True}, 0),
    ],
    ids=str,
)
def test_more_pictures_than_are_allowed(server: dict[str, Any], most: int, tmp_path: Path) -> None:
    (name,) = server
    option = name.removesuffix(".image")
    task = {"task": "chartqa", "num_questions": 4, "num_fewshot": 0, **CHAT}
    gate = ANY_SCORE | {"metric": "relaxed_accuracy"}
    told = [f"the contract's vision asks for 2 pictures in one request, of which {option} allows {most}: vLLM refuses that"]
    if not most:
        told.append(f"chartqa, at least, asks for a picture, and {option} allows none: vLLM refuses that")
    assert refused(tmp_path, server, task=task, gate=gate, capabilities=["chat", "vision"]) == told


def test_more_requests_than_may_be_under_way(tmp_path: Path) -> None:
    given = refused(tmp_path, {"max-num-queued-reqs": 12, "max-num-seqs": 16})
    asked = [("the contract", 64), ("gsm8k", 16), ("the load", 16), ("the stage paths", 16)]
    told = "{} asks for {} requests under way at once, of which max-num-queued-reqs allows 12: vLLM refuses that"
    assert given == [told.format(*each) for each in asked]


TOLD_OF_CONTRACT = (
    "the contract asks for 64 requests under way at once, of which max-num-queued-reqs allows 63: vLLM refuses that"
)
FEW = {"max-num-queued-reqs": 63, "max-num-seqs": 16}


def test_a_task_that_generates_has_no_more_requests_under_way_than_questions_at_once(tmp_path: Path) -> None:
    # A fifth of the questions, where no run asks more.
    in_blocks = GSM8K | {"num_questions": 315, "num_concurrent": 256}
    assert refused(tmp_path, FEW, task=in_blocks) == [TOLD_OF_CONTRACT]
    together = GSM8K | {"num_questions": 63, "num_concurrent": 256, "sequential": False}
    assert refused(tmp_path, FEW, task=together) == [TOLD_OF_CONTRACT]
    (_, more) = refused(tmp_path, FEW, task=together | {"num_questions": 64})
    assert more.startswith("gsm8k asks for 64 requests under way at once")


def test_each_question_may_have_several_requests(tmp_path: Path) -> None:
    likelihoods = {"task": "hellaswag", "num_questions": 4, "num_concurrent": 256, "sequential": False}
    (_, choices) = refused(tmp_path, FEW, task=likelihoods, gate=ANY_SCORE | {"metric": "acc"})
    assert choices.startswith("hellaswag asks for 256 requests under way at once")
    (tmp_path / "tasks").mkdir(exist_ok=True)
    (tmp_path / "tasks" / "again.yaml").write_text(CODE_FILE.replace("made_code", "made_again") + "repeats: 32\n")
    again = CODE | {"task": "made_again", "num_concurrent": 256, "sequential": False, "stop": []}
    (_, repeated) = refused(tmp_path, FEW, task=again, gate=ANY_SCORE)
    assert repeated.startswith("made_again asks for 128 requests under way at once")


def test_a_recipe_with_a_baseline_asks_everything_at_once(tmp_path: Path) -> None:
    gate = {"metric": "exact_match", "filter": "flexible-extract", "max_loss": 0.01, "unit": "fraction", "task": "gsm8k"}
    in_blocks = GSM8K | {"num_questions": 315, "num_concurrent": 256}
    (_, whole) = refused(tmp_path, FEW, task=in_blocks, gate=gate)
    assert whole.startswith("gsm8k asks for 256 requests under way at once")


@pytest.mark.parametrize(
    ("sequential", "starts", "at_once"),
    [(True, 1, None), (False, 1, 256), (True, 3, 256)],
    ids=["blocks", "baseline", "starts"],
)
def test_a_plan_asks_everything_at_once_as_a_baseline_or_in_further_starts(
    sequential: bool, starts: int, at_once: int | None
) -> None:
    plan = passed_report().plan
    (task,) = plan.accuracy
    settings = task.settings.model_copy(update={"num_questions": 315, "num_concurrent": 256, "sequential": True})
    asked = task.model_copy(update={"settings": settings, "sequential": sequential})
    server = plan.server.model_copy(update={"arguments": plan.server.arguments | {"max-num-queued-reqs": 100}})
    changed: dict[str, Any] = {
        "server": server,
        "contract": None,
        "accuracy": [asked],
        "starts": starts,
        "establishes": not sequential,
    }
    changed["gates"] = [
        MaxLoss(metric="exact_match", filter="flexible-extract", max_loss=0.01, unit="fraction", task=settings.task)
    ]
    many = plan.model_copy(update=changed)
    if at_once is None:
        check_planned_tasks([many])
        return
    with pytest.raises(CallerError, match=f"{settings.task} asks for {at_once} requests under way at once"):
        check_planned_tasks([many])


CURVE = {"concurrencies": [1, 300]}
SEARCH = {"slo": {"ttft_p50_ms": 100.0}, "most_concurrency": 70}


@pytest.mark.parametrize(
    ("sweep", "told"),
    [
        (CURVE, ["the sweep asks for 300 requests"]),
        (SEARCH, ["the sweep's search, at most, asks for 70 requests"]),
        (CURVE | SEARCH, ["the sweep asks for 300 requests", "the sweep's search, at most, asks for 70 requests"]),
        ({"slo": SEARCH["slo"]}, []),
        (SEARCH | {"search": ["request_rate"]}, []),
    ],
    ids=str,
)
def test_a_sweep_has_its_own_clients(sweep: Document, told: list[str], tmp_path: Path) -> None:
    document = made({"max-num-queued-reqs": 64}, [GSM8K], [SCORE])
    document["gpu_types"]["h100"]["profiles"]["balanced"]["sweep"] = sweep
    given = refused(tmp_path, {"max-num-queued-reqs": 64}, gpu_types=document["gpu_types"])
    assert [line.partition(" under way")[0] for line in given] == told


@pytest.mark.parametrize(
    ("changes", "place", "told"),
    [
        ({}, "accuracy.gsm8k", "gsm8k asks for"),
        ({"accuracy": []}, "load", "the load asks for"),
        ({"accuracy": [], "sweep": Sweep(concurrencies=[300])}, "sweep", "the sweep asks for 300"),
    ],
    ids=["task", "load", "sweep"],
)
def test_plans_are_held_to_the_same_limits(changes: dict[str, Any], place: str, told: str) -> None:
    plan, most = passed_report().plan, 299 if "sweep" in changes else 0
    arguments = plan.server.arguments | {"max-num-queued-reqs": most}
    server = plan.server.model_copy(update={"arguments": arguments})
    few = plan.model_copy(update={"server": server, "contract": None, **changes})
    with pytest.raises(CallerError, match="max-num-queued-reqs allows") as raised:
        check_planned_tasks([few])
    assert raised.value.place == place
    assert raised.value.problem.startswith(told)


def test_what_is_asked_for_is_what_is_sent() -> None:
    assert request_limits.PATHS_LOGPROBS == ALTERNATIVES
    assert likelihood.ALTERNATIVES == request_limits.OTHER_LOGPROBS
    assert (request_limits.CONTRACT_AT_ONCE, request_limits.PATHS_AT_ONCE) == (MANY, MOST_AT_ONCE)


@pytest.mark.parametrize("name", VARIABLES)
def test_a_limit_counts_from_the_first_version_that_reads_it(name: str) -> None:
    first = next(version for version in known_versions() if name in table_of(version).environment)
    assert Version(first) == Version(VARIABLES[name][0])


@pytest.mark.engine
def test_the_limits_are_vllms_own(engine: EngineEnvironment) -> None:
    """Their values by default, and what vLLM's own classes of requests take."""
    done = run_script(engine, OF_VLLM, json.dumps(sorted(VARIABLES)))
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout.splitlines()[-1])
    assert answer["values"] == {name: VARIABLES[name][1] for name in answer["values"]}
    assert len(answer["values"]) == 3, "0.33 has one more"
    assert answer["stops"] == [True, False]
    assert answer["choices"] == [True, False]


OF_VLLM = """
import json, sys
import vllm.envs as envs
from vllm.entrypoints.openai.completion.protocol import CompletionRequest
from vllm.exceptions import VLLMValidationError
from vllm.sampling_params import SamplingParams

def takes(make, **options):
    try:
        make(**options)
    except (ValueError, VLLMValidationError):
        return False
    return True

names = [name for name in json.loads(sys.argv[1]) if name in envs.environment_variables]
print(json.dumps({
    "values": {name: envs.environment_variables[name]() for name in names},
    "stops": [takes(CompletionRequest, model="m", prompt="p", stop=["a"] * count) for count in (4, 5)],
    "choices": [takes(SamplingParams, n=count) for count in (16_384, 16_385)],
}))
"""


# --- how large pictures may be


def test_how_large_pictures_may_be() -> None:
    server = passed_report().plan.server
    assert picture_limits(server, "0.24.0") == NO_LIMITS
    assert picture_limits(server, "0.32.0") == PictureLimits(most_pixels=178_956_970)
    assert picture_limits(server, "0.33.0") == PictureLimits(most_pixels=178_956_970, most_pixels_together=178_956_970)
    own = {"VLLM_MAX_IMAGE_PIXELS": "1000", "VLLM_MAX_MEDIA_REQUEST_DECODE_BYTES": "8000"}
    limited = server.model_copy(update={"environment": own})
    assert picture_limits(limited, "0.33.0") == PictureLimits(most_pixels=1000, most_pixels_together=2000)
    unlimited = server.model_copy(update={"environment": dict.fromkeys(own, "0")})
    assert picture_limits(unlimited, "0.33.0") == NO_LIMITS


@pytest.mark.parametrize(
    ("limits", "told"),
    [
        (PictureLimits(most_pixels=1199), "question 1: a picture has 40 x 30 pixels, more than VLLM_MAX_IMAGE_PIXELS, 1,199"),
        (
            PictureLimits(most_pixels_together=2399),
            "2 pictures of one question have 2,400 pixels, more than VLLM_MAX_MEDIA_REQUEST_DECODE_BYTES has room for, 2,399",
        ),
    ],
    ids=str,
)
def test_a_question_with_larger_pictures_is_refused_before_the_server_answers(
    limits: PictureLimits, told: str, tmp_path: Path
) -> None:
    one, two = draw_picture("black"), draw_picture("white")
    rows = [exam_row(1, "Of <image 1> and <image 2>, how many are red?", "B", one, two)]
    assert told in str(refuse_task(pictures_plan(tmp_path, rows, "mmmu_val_math"), tmp_path / "lm-eval", limits))
