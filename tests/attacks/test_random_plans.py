"""Plans that differ from the recipe's in any one field: each is for a person, or only its host can know that field."""

import copy
import json
import random
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from tests.approval.builder import made_key
from tests.builders.plans import document_in, engine_in, plans_of
from tests.recipes import Document
from tests.report.builder import passed_report
from vllm_qualify.approval.published import PublishedRun
from vllm_qualify.approver.decisions import Desk
from vllm_qualify.engine.environment import EngineEnvironment
from vllm_qualify.plan.cell import CellPlan
from vllm_qualify.plan.contradiction import contradiction
from vllm_qualify.publish.bundle import Manifest, StoredObject
from vllm_qualify.publish.stores import open_store
from vllm_qualify.recipe.recipe import LoadedRecipe, Recipe

# What may differ in an approval that no person gives, each with what is done about it.
KNOWN_TO_THE_HOST = {
    "run_id": "the run's place in the store has it, too",
    "fingerprint": "measurements are compared only between equal ones; the type of the GPU is the cell's",
    "cell.release.engine.version": "the digest says what the engine is; the version chooses among the recipe's options",
    "cell.release.engine.python": "as above",
    "cell.release.engine.packages": "as above",
    "cell.release.engine.changed_files": "as above",
    "server.engine.python": "a place on the host",
    "server.model": "a place on the host; the release has the digest of its content",
    "accuracy.0.questions": "places on the host; their digests are compared",
    "accuracy.0.repetitions": "more are more work",
    "accuracy.0.order": "drawn for the run: any order asks the same questions",
    "likelihood.texts": "a place on the host; its digest is compared",
    "prompts": "a place on the host; its digest is compared",
    "starts": "more are more work",
    "drawn": "drawn for the run: nothing is held to the content of a drawn prompt",
    "load.time_budget_s": "a load that is too short for its gates is not judged",
    "price_usd_gpu_hour": "compared where a gate is on the cost",
    "pulled_s": "a measured time",
    "unasked": "a note",
    "warnings": "a note",
}
# Longer or more than the recipe's is no departure, and less is one.
ONLY_MORE = {"accuracy.0.repetitions", "starts"}
# Any is no departure, and none is one.
ONLY_SOME = {"accuracy.0.order", "drawn"}


def only_a_host_knows(name: str, own: Any, other: Any) -> bool:
    """Whether a run may be approved automatically though this field differs from the recipe's own plan."""
    is_known = any(f"{name}.".startswith(f"{known}.") for known in KNOWN_TO_THE_HOST)
    return is_known and (name not in ONLY_MORE or other > own) and (name not in ONLY_SOME or bool(other))


def write(path: Path, text: str) -> str:
    path.write_text(text)
    return str(path)


class Approver:
    """A desk with the recipe of a plan, in which much is set."""

    def __init__(self, document: Document, engine: EngineEnvironment, folder: Path) -> None:
        document["accuracy"][0]["questions"] = {
            "test": write(folder / "test.jsonl", '{"question": "1 + 1?", "answer": "#### 2"}\n'),
            "shots": write(folder / "shots.jsonl", '{"question": "2?", "answer": "#### 2"}\n' * 9),
        }
        document["likelihood"] = {"texts": write(folder / "texts.jsonl", '{"text": "abc"}\n')}
        profile = document["gpu_types"]["cpu"]["profiles"]["latency"]
        profile["load"] = {"prompts": write(folder / "prompts.jsonl", '{"prompt": "a"}\n' * 20), "output_len": 4}
        profile["load"] |= {"max_concurrency": 1, "num_prompts": 14, "num_warmups": 0}
        profile["paths"] = {"leave_out": {"evicted": "a large cache"}}
        profile["soak_min"] = 5.0
        profile["environment"], profile["server"] = {"VLLM_CPU_KVCACHE_SPACE": "1"}, {"max-model-len": 64}
        document["capabilities"] = ["chat", "tools"]
        document["approval"] = {"automatic": True}
        # Only how the candidate is compared is the store's word, and is tested with the chain of baselines.
        for gates in (document["gates"], profile["gates"]):
            gates[:] = [gate for gate in gates if not gate.keys() & {"max_loss", "max_nll_increase"}]
        self.plan = next(plan for plan in plans_of(document, engine) if plan.cell.profile == "latency")
        loaded = LoadedRecipe(recipe=Recipe.model_validate(document), folder=Path("/recipes"))
        store = open_store((folder / "store").as_uri())
        store.check()
        digest = self.plan.cell.release.engine.digest
        self.stored = StoredObject(key="reports", sha256="0" * 64, size=1)
        self.manifest = Manifest.model_construct(  # type: ignore[call-arg]  # the desk reads no other field, and a whole manifest would need a whole run
            run_id=self.plan.run_id, cell=self.plan.cell.id, sequence=1, objects=[]
        )
        self.desk = Desk(store, made_key(folder / "key.pem"), {loaded.recipe.name: loaded}, engines=[digest])

    def why_by_hand(self, plan: CellPlan) -> str:
        report = passed_report()
        judgement = report.judgement.model_copy(update={"not_judged": []})
        report = report.model_copy(update={"plan": plan, "judgement": judgement})
        run = PublishedRun(self.stored, self.manifest, self.stored, report, {})
        return contradiction(plan) or self.desk.why_by_hand(run)


@pytest.fixture(scope="module")
def approver(tmp_path_factory: pytest.TempPathFactory) -> Approver:
    folder = tmp_path_factory.mktemp("approver")
    return Approver(document_in(folder), engine_in(folder), folder)


def test_the_recipes_own_plan_needs_nobody(approver: Approver) -> None:
    assert approver.why_by_hand(approver.plan) == ""


Place = tuple[str | int, ...]


def leaves(value: Any, place: Place = ()) -> Iterator[Place]:
    """Each place of a document, also those of lists and objects that are empty or whole."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for name, each in inner:
        yield (*place, name)
        yield from leaves(each, (*place, name))


def at(value: Any, place: Place) -> Any:
    for name in place:
        value = value[name]
    return value


def put(value: Any, place: Place, new: Any) -> Any:
    value = copy.deepcopy(value)
    at(value, place[:-1])[place[-1]] = new
    return value


def another_of_its_form(text: str) -> str:
    """Other hex digits in place of a text's, such as a digest's; of another text, itself."""
    return re.sub("[0-9a-f]{32,}", lambda digits: f"{int(digits[0], 16) ^ 1:0{len(digits[0])}x}", text)


def others(value: Any, drawn: random.Random) -> list[Any]:
    """What may stand in place of a value, valid or not."""
    numbers = [drawn.choice([0, 1, 2, 7, 4096]), drawn.uniform(0, 100)]
    texts = ["x", "a" * 64, f"sha256:{'a' * 64}", "1", "chat", "pass", drawn.choice(["evil/model", "/elsewhere", "2030-01-01"])]
    match value:
        case bool():
            return [not value]
        case int() | float():
            return [value + 1, value / 2, value - 1, *numbers, None]
        case str():
            return ["", another_of_its_form(value), f"{value}x", value[:-1], *texts, None]
        case list():
            return [value[1:], value[:-1], [*value, *value[:1]], [], *([text] for text in texts), [numbers[0]], None]
        case dict():
            return [dict(list(value.items())[1:]), value | {"x": "x"}, value | {"VLLM_X": "1"}, {}, None]
    return [*numbers, *texts, True, [], {}, ["x"], {"x": "x"}]


@settings(max_examples=1000, suppress_health_check=[HealthCheck.filter_too_much])
@given(seed=st.integers(min_value=0))
@pytest.mark.thorough
def test_a_plan_with_any_field_of_its_own_is_for_a_person(approver: Approver, seed: int) -> None:
    drawn, base = random.Random(seed), approver.plan.model_dump(mode="json")
    place = drawn.choice([*leaves(base)])
    changed = put(base, place, drawn.choice(others(at(base, place), drawn)))
    try:
        plan = CellPlan.model_validate_json(json.dumps(changed))
    except ValidationError:
        assume(False)
    assume(plan != approver.plan)
    name = ".".join(map(str, place))
    if not approver.why_by_hand(plan):
        assert only_a_host_knows(name, at(base, place), at(changed, place)), f"{name} = {at(changed, place)}"


def test_each_field_that_only_a_host_knows_is_one(approver: Approver) -> None:
    """The list has no line too many."""
    base = approver.plan.model_dump(mode="json")
    drawn = random.Random(1)
    unseen = dict[str, list[Any]]()
    for place in leaves(base):
        for new in others(at(base, place), drawn):
            try:
                plan = CellPlan.model_validate_json(json.dumps(put(base, place, new)))
            except ValidationError:
                continue
            if plan != approver.plan and not approver.why_by_hand(plan):
                name = ".".join(map(str, place))
                unseen.setdefault(name, [])
                if not only_a_host_knows(name, at(base, place), new):
                    unseen[name].append(new)
    assert {name: values for name, values in unseen.items() if values} == {}
    assert {known for known in KNOWN_TO_THE_HOST if any(f"{name}.".startswith(f"{known}.") for name in unseen)} == {
        *KNOWN_TO_THE_HOST
    }
