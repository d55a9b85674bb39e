"""What follows from a server: how many clients, which prompts, which cells share it, and what a fit changes."""

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest

from tests.builders.comparisons import DRAFTED, cell_plan, server_plan, task_plan
from tests.builders.plans import CPU, H200, engine, only, plans_of
from tests.recipes import Document, reference
from vllm_qualify.engine.environment import EngineEnvironment
from vllm_qualify.engine.gpu import Fingerprint
from vllm_qualify.errors import CallerError, HostError
from vllm_qualify.plan.cell import CellPlan
from vllm_qualify.plan.cells import plan_fitted, sharing_a_server
from vllm_qualify.recipe.accuracy import Accuracy
from vllm_qualify.recipe.gates import Gate, gate_of
from vllm_qualify.recipe.load import LoadSettings
from vllm_qualify.recipe.searches import Fit

__all__ = ["engine"]

FOUR_H200 = H200.model_copy(update={"count": 4, "devices": [0, 1, 2, 3]})
WORKLOAD: Document = {"input_len": 8, "output_len": 4, "num_warmups": 0}
OF_FILE: Document = {"output_len": 4, "num_warmups": 0, "max_concurrency": 1}
PLACE = "gpu_types.cpu.profiles.balanced.load"
TTFT_P90 = {"metric": "ttft_p90_ms", "maximum": 500.0, "unit": "ms"}


def planned(engine: EngineEnvironment, load: Document, **profile: Any) -> CellPlan:
    """The reference recipe's cell with this workload, and no max-num-seqs but what is given."""
    document = reference()
    document["gpu_types"]["cpu"]["profiles"] = {"balanced": {"load": load} | profile}
    return only(plans_of(document, engine))


# --- as many clients as the server's max-num-seqs


@pytest.mark.parametrize(
    ("load", "server", "clients", "prompts"),
    [
        ({}, {"max-num-seqs": 32}, 32, 160),
        ({"max_concurrency": 4}, {"max-num-seqs": 32}, 4, 20),
        ({"max_concurrency": 4}, {}, 4, 20),
        ({"num_prompts": 200}, {"max-num-seqs": 32}, 32, 200),
        ({"max_concurrency": 4, "num_prompts": 21}, {"max-num-seqs": 32}, 4, 21),
    ],
)
def test_clients_follow_the_server_and_prompts_the_clients(
    engine: EngineEnvironment, load: Document, server: Document, clients: int, prompts: int
) -> None:
    plan = planned(engine, WORKLOAD | load, server=server)
    assert (plan.load.max_concurrency, plan.load.num_prompts) == (clients, prompts)
    assert (plan.prompts, plan.load.prompts_sha256, plan.fit, plan.workload) == (None, None, None, None)


def test_prompts_are_as_many_as_the_gates_need(engine: EngineEnvironment) -> None:
    for clients, prompts in ((4, 2 * 44), (40, 5 * 40)):
        planned_cell = planned(engine, WORKLOAD | {"max_concurrency": clients}, gates=[TTFT_P90])
        assert planned_cell.load.num_prompts == prompts


@pytest.mark.parametrize("server", [{}, {"max-num-seqs": "32"}, {"max-num-seqs": True}])
def test_clients_that_follow_nothing_are_the_callers_mistake(engine: EngineEnvironment, server: Document) -> None:
    with pytest.raises(CallerError, match="the number of clients is not given") as raised:
        planned(engine, WORKLOAD, server=server)
    assert raised.value.place == f"{PLACE}.max_concurrency"


def test_prompts_that_are_too_few_for_the_servers_clients_are_reported_as_that(engine: EngineEnvironment) -> None:
    with pytest.raises(CallerError, match="159 prompts are too few for 32 clients") as raised:
        planned(engine, WORKLOAD | {"num_prompts": 159}, server={"max-num-seqs": 32})
    assert raised.value.place == f"{PLACE}.num_prompts"
    assert "160 or more" in raised.value.remedy


def test_a_fit_that_finds_max_num_seqs_leaves_the_clients_open(engine: EngineEnvironment) -> None:
    planned_cell = planned(engine, WORKLOAD, fit={"max_num_seqs": True})
    assert (planned_cell.fit, planned_cell.workload) == (Fit(max_num_seqs=True), LoadSettings.model_validate(WORKLOAD))
    with pytest.raises(CallerError, match="the number of clients is not given"):
        planned(engine, WORKLOAD, fit={"tensor_parallel_sizes": [1, 2]})


# --- prompts of a file


def prompts(folder: Path, *lines: str | bytes) -> Document:
    """A load of these lines, each of which is written as it is."""
    body = b"".join((line.encode() if isinstance(line, str) else line) + b"\n" for line in lines)
    (folder / "prompts.jsonl").write_bytes(body)
    return OF_FILE | {"prompts": str(folder / "prompts.jsonl")}


GOOD = [json.dumps({"prompt": f"Question {number}"}) for number in range(5)]


def test_the_prompts_of_a_file_are_known_by_its_content(engine: EngineEnvironment, tmp_path: Path) -> None:
    planned_cell = planned(engine, prompts(tmp_path, *GOOD))
    content = (tmp_path / "prompts.jsonl").read_bytes()
    assert planned_cell.prompts == tmp_path / "prompts.jsonl"
    assert planned_cell.load.prompts_sha256 == hashlib.sha256(content).hexdigest()
    other = planned(engine, prompts(tmp_path, *GOOD[:-1], '{"prompt": "Another"}'))
    assert other.load != planned_cell.load
    assert CellPlan.model_validate_json(planned_cell.model_dump_json()) == planned_cell


def test_what_else_a_line_has_and_how_it_is_written_does_not_matter(engine: EngineEnvironment, tmp_path: Path) -> None:
    """Some characters end a line for Python, and not for JSON lines."""
    strange = json.dumps({"prompt": "one\u2028two\x85three", "id": 7}, ensure_ascii=False)
    assert planned(engine, prompts(tmp_path, strange, *GOOD[1:])).load.num_prompts == 5
    assert planned(engine, prompts(tmp_path, *(f"{line}\r" for line in GOOD))).load.num_prompts == 5


def test_a_file_of_prompts_that_is_not_there_is_reported(engine: EngineEnvironment, tmp_path: Path) -> None:
    with pytest.raises(HostError, match=r"no prompts at .*none\.jsonl") as raised:
        planned(engine, OF_FILE | {"prompts": str(tmp_path / "none.jsonl")})
    assert raised.value.place == "check"


NO_PROMPTS: list[str | bytes] = [
    *("", "Question 3", '"Question 3"', '["Question 3"]', '{"Prompt": "Question 3"}', '{"prompt": ""}'),
    *('{"prompt": 3}', '{"prompt": "Question 3"', '{"prompt": null}', b'{"prompt": "\xff"}'),
]


@pytest.mark.parametrize("line", NO_PROMPTS)
def test_a_line_that_is_no_prompt_is_reported(engine: EngineEnvironment, tmp_path: Path, line: str | bytes) -> None:
    with pytest.raises(CallerError, match=r'line 3 is no \{"prompt": "…"\}') as raised:
        planned(engine, prompts(tmp_path, *GOOD[:2], line, *GOOD[3:]))
    assert raised.value.place == str(tmp_path / "prompts.jsonl")


def test_prompts_that_would_come_twice_are_reported(engine: EngineEnvironment, tmp_path: Path) -> None:
    with pytest.raises(CallerError, match="it has 4 prompts, and the load asks 5: some would come twice"):
        planned(engine, prompts(tmp_path, *GOOD[:4]))
    with pytest.raises(CallerError, match="it has 0 prompts"):
        planned(engine, prompts(tmp_path))


# --- cells that share a server


def cell(profile: str, seqs: int = 8, fit: Fit | None = None, environment: dict[str, str] | None = None) -> CellPlan:
    server = server_plan(**{"max-num-seqs": seqs}).model_copy(update={"environment": environment or {}})
    cell_of = cell_plan([], server=server, fit=fit)
    return cell_of.model_copy(update={"cell": cell_of.cell.model_copy(update={"profile": profile})})


def grouped(*plans: CellPlan) -> list[list[str]]:
    return [[plan.cell.profile for plan in group] for group in sharing_a_server(list(plans))]


def test_cells_with_the_same_server_share_it_in_the_order_of_their_first_ones() -> None:
    assert grouped(cell("a", 16), cell("b", 8), cell("c", 16), cell("d", 4), cell("e", 8)) == [["a", "c"], ["b", "e"], ["d"]]
    assert grouped() == []


def test_another_environment_is_another_server_and_a_cell_that_is_fitted_has_its_own() -> None:
    assert grouped(cell("a"), cell("b", environment={"A": "1"}), cell("c")) == [["a", "c"], ["b"]]
    fit = Fit(max_num_batched_tokens=[2048, 4096])
    assert grouped(cell("a", fit=fit), cell("b"), cell("c", fit=fit), cell("d")) == [["a"], ["b", "d"], ["c"]]


# --- what the fit chose, and what follows


def to_be_fitted(workload: Document | None = None, gates: tuple[Gate, ...] = (), **changes: Any) -> CellPlan:
    """A cell on the first of four GPUs with a fit of max-num-seqs, which its questions follow."""
    settings = LoadSettings.model_validate(WORKLOAD | (workload or {}))
    about: dict[str, Any] = {
        "server": server_plan(dtype="bfloat16").model_copy(update={"gpus": [0]}),
        "fingerprint": FOUR_H200,
        "fit": Fit(max_num_seqs=True),
        "workload": settings,
        "load": settings.make_load(64, 1),
        "accuracy": [task_plan()],
    }
    return cell_plan(gates, **about | changes)


def test_the_load_and_the_questions_follow_what_was_found_unless_the_recipe_gives_them() -> None:
    plan = to_be_fitted()
    fitted_plan = plan_fitted(plan, {"max-num-seqs": 24})
    assert fitted_plan.server.arguments == {"dtype": "bfloat16", "max-num-seqs": 24}
    assert (fitted_plan.load.max_concurrency, fitted_plan.load.num_prompts) == (24, 120)
    assert [task.num_concurrent for task in fitted_plan.accuracy] == [24]
    changed = {name for name in CellPlan.model_fields if getattr(fitted_plan, name) != getattr(plan, name)}
    assert changed == {"server", "load", "accuracy"}
    accuracy = [task_plan(Accuracy(num_questions=40, num_concurrent=7))]
    fitted_plan = plan_fitted(to_be_fitted({"max_concurrency": 4}, accuracy=accuracy), {"max-num-seqs": 24})
    assert (fitted_plan.load.max_concurrency, fitted_plan.accuracy[0].num_concurrent) == (4, 7)


def test_prompts_are_still_as_many_as_the_gates_need_unless_there_is_no_workload() -> None:
    plan = to_be_fitted(gates=(gate_of(**TTFT_P90),))
    assert plan_fitted(plan, {"max-num-seqs": 4}).load.num_prompts == 2 * 44
    settled = plan.model_copy(update={"workload": None})
    assert plan_fitted(settled, {"max-num-seqs": 4}).load == settled.load


def test_the_prompts_of_the_file_stay_those_that_were_checked() -> None:
    workload = {"input_len": None, "prompts": "prompts.jsonl", "max_concurrency": 4}
    plan = to_be_fitted(workload, fit=Fit(tensor_parallel_sizes=[1, 2]))
    known = plan.model_copy(update={"load": plan.load.model_copy(update={"prompts_sha256": "0" * 64})})
    assert plan_fitted(known, {"tensor-parallel-size": 2}).load == known.load


def test_the_gpus_are_as_many_as_were_found_and_no_more_than_there_are() -> None:
    for size in (1, 2, 4):
        fitted_plan = plan_fitted(to_be_fitted(), {"tensor-parallel-size": size, "max-num-seqs": 8})
        assert fitted_plan.server.gpus == FOUR_H200.devices[:size]
    with pytest.raises(HostError, match="takes 8 GPUs, and this machine has 4 h200"):
        plan_fitted(to_be_fitted(), {"tensor-parallel-size": 8})


# --- the same server without speculative decoding


def drafted(machine: Fingerprint, **changes: Any) -> CellPlan:
    """A plan to be fitted with a draft, whose other server follows."""
    server = server_plan(**DRAFTED).model_copy(update={"gpus": machine.devices[:1], "draft_digest": "0" * 64} | changes)
    return to_be_fitted({"max_concurrency": 4}, server=server, fingerprint=machine)


def test_the_other_server_is_the_same_without_it_on_gpus_that_are_free() -> None:
    chosen: dict[str, Any] = {"tensor-parallel-size": 2, "max-num-seqs": 24}
    fitted_plan = plan_fitted(drafted(FOUR_H200), chosen)
    changes = {"arguments": chosen, "gpus": [2, 3], "draft_digest": None}
    assert fitted_plan.undrafted == fitted_plan.server.model_copy(update=changes)
    assert not fitted_plan.undrafted_in_turn


@pytest.mark.parametrize(("machine", "gpus"), [(H200, 1), (FOUR_H200, 3), (FOUR_H200, 4)])
def test_without_room_for_both_they_take_turns_on_the_same_gpus(machine: Fingerprint, gpus: int) -> None:
    plan = plan_fitted(drafted(machine), {"tensor-parallel-size": gpus})
    assert plan.undrafted_in_turn
    assert plan.undrafted is not None
    assert plan.undrafted.gpus == plan.server.gpus == machine.devices[:gpus]
    assert plan.undrafted.arguments == {"tensor-parallel-size": gpus}


@pytest.mark.parametrize("load", [{"request_rate": 2.0}, {"max_concurrency": 4, "api": "chat", "turns": 2, "window": "whole"}])
def test_requests_at_a_rate_or_in_turns_are_not_compared(engine: EngineEnvironment, load: Any) -> None:
    plan = planned(engine, WORKLOAD | {"num_prompts": 64} | load, server=DRAFTED)
    assert (plan.is_speculative, plan.undrafted, plan.undrafted_in_turn) == (True, None, False)


def test_a_cpu_has_room_for_both_and_a_server_without_speculative_decoding_has_no_other() -> None:
    chosen: dict[str, Any] = {"max-num-seqs": 24}
    undrafted = plan_fitted(drafted(CPU), chosen).undrafted
    assert undrafted is not None
    assert (undrafted.arguments, undrafted.gpus) == (chosen, [])
    assert plan_fitted(to_be_fitted(), chosen).undrafted is None


def test_a_new_plan_has_the_other_server_too(engine: EngineEnvironment) -> None:
    planned_cell = planned(engine, WORKLOAD | {"max_concurrency": 4}, server=DRAFTED)
    undrafted = {name: value for name, value in planned_cell.server.arguments.items() if name not in DRAFTED}
    assert planned_cell.is_speculative
    assert planned_cell.undrafted is not None
    assert planned_cell.undrafted.arguments == undrafted
