"""Fit: what is found, and after which starts, on servers that are made up: each says what it was told to."""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import pytest

from tests.builders.comparisons import cell_plan, server_plan
from vllm_qualify.engine.gpu import Fingerprint
from vllm_qualify.errors import HostError, RecipeError, ReleaseError
from vllm_qualify.evidence.load.fitting import BLOCK_TOK, MOST_CONFIRMATIONS, TOO_SMALL, Fitting, Started, Tried, Try, block_tok
from vllm_qualify.evidence.measurement import Measurement, invalid, valid
from vllm_qualify.evidence.startup import KvCache
from vllm_qualify.plan.cell import CellPlan
from vllm_qualify.recipe.load import LoadSettings
from vllm_qualify.recipe.metrics import OUTPUT_THROUGHPUT
from vllm_qualify.recipe.searches import Fit
from vllm_qualify.recipe.serving import ServerArguments

H200S = Fingerprint(gpu_type="h200", name="NVIDIA H200", count=4, memory_mib=143_771, devices=[0, 1, 2, 3])
WORKLOAD = LoadSettings(input_len=96, output_len=32, num_warmups=0)
# What a request of the workload takes.
BLOCKS = 128 // BLOCK_TOK
TENSOR_PARALLEL, SEQUENCES, BATCHED = "tensor-parallel-size", "max-num-seqs", "max-num-batched-tokens"


def out_of_memory(kind: str = "cuda-out-of-memory", problem: str = "out of GPU memory") -> RecipeError:
    return RecipeError(problem, "use more GPUs", "serve", kind=kind)


def holding(requests: int, block: int | None = None) -> KvCache:
    """A KV cache that holds just so many requests, beside the engine's own block."""
    return KvCache(tokens=(requests * BLOCKS + 1) * BLOCK_TOK, max_concurrency=None, block_tok=block)


def rate(tok_s: float) -> Measurement:
    return valid(OUTPUT_THROUGHPUT, tok_s, "load/bench-*.json", sample_count=40)


def number_in(arguments: ServerArguments, option: str, default: int = 0) -> int:
    number = arguments.get(option, default)
    assert isinstance(number, int)
    return number


@dataclass
class Machine:
    """What becomes of a server by its arguments.

    `starts` has the plan of each start, `loads` of each measured load, `confirmed` of each whose preemptions were counted.
    """

    of: Callable[[ServerArguments], KvCache | None] = lambda _: holding(8)
    rates: Callable[[ServerArguments], Measurement] = lambda _: rate(1.0)
    preempts: Callable[[ServerArguments], int] = lambda _: 0
    starts: list[CellPlan] = field(default_factory=list)
    loads: list[CellPlan] = field(default_factory=list)
    confirmed: list[CellPlan] = field(default_factory=list)

    @contextmanager
    def attempt(self, plan: CellPlan, folder: Path) -> Iterator[Started]:
        assert folder.is_dir()
        self.starts.append(plan)

        def load() -> Measurement:
            self.loads.append(plan)
            return self.rates(plan.server.arguments)

        def preemptions() -> int:
            self.confirmed.append(plan)
            return self.preempts(plan.server.arguments)

        yield Started(self.of(plan.server.arguments), load, preemptions)

    @property
    def started(self) -> list[ServerArguments]:
        return [plan.server.arguments for plan in self.starts]


def plan_of(fit: Fit | None, workload: LoadSettings = WORKLOAD, **server: Any) -> CellPlan:
    """With 8 clients where they do not follow what is found."""
    asked = workload if fit and fit.max_num_seqs else workload.model_copy(update={"max_concurrency": 8})
    load = asked.make_load(64, 1)
    return cell_plan([], fit=fit, workload=asked, fingerprint=H200S, server=server_plan(**server), load=load)


def find(machine: Machine, folder: Path, workload: LoadSettings = WORKLOAD, **fit: Any) -> Tried:
    return Fitting(plan_of(Fit(**fit), workload), machine.attempt, folder).find()


def refused(machine: Machine, folder: Path, message: str, **fit: Any) -> RecipeError:
    with pytest.raises(RecipeError, match=message) as raised:
        find(machine, folder, **fit)
    return raised.value


def by_size(holds: dict[int, int | Exception]) -> Callable[[ServerArguments], KvCache]:
    """By the tensor-parallel size how many requests the server holds, or how it fails."""

    def of(arguments: ServerArguments) -> KvCache:
        held = holds[number_in(arguments, TENSOR_PARALLEL, 1)]
        if isinstance(held, Exception):
            raise held
        return holding(held)

    return of


def by_turn(*holds: int) -> Callable[[ServerArguments], KvCache]:
    """How many requests each start holds, one after another."""
    left = list(holds)
    return lambda _: holding(left.pop(0))


def by_batch(rates_by_size: dict[int, float | str]) -> Callable[[ServerArguments], Measurement]:
    """By max-num-batched-tokens the output throughput, or why the load is invalid."""

    def rates(arguments: ServerArguments) -> Measurement:
        figure = rates_by_size[number_in(arguments, BATCHED)]
        return invalid(OUTPUT_THROUGHPUT, figure, "load/bench-*.json") if isinstance(figure, str) else rate(figure)

    return rates


def kept(folder: Path) -> list[Try]:
    numbers = range(1, len(list(folder.iterdir())) + 1)
    return [Try.model_validate_json((folder / f"try-{number}" / "try.json").read_bytes()) for number in numbers]


def test_a_plan_with_nothing_to_fit_is_a_mistake_of_the_program(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="nothing to fit"):
        Fitting(plan_of(None), Machine().attempt, tmp_path).find()
    assert not kept(tmp_path)


# --- the smallest tensor-parallel size


@pytest.mark.parametrize("kind", TOO_SMALL)
def test_the_first_size_that_has_enough_memory_is_the_smallest(tmp_path: Path, kind: str) -> None:
    machine = Machine(by_size({1: out_of_memory(kind), 2: out_of_memory(kind), 4: 8}))
    fitted = find(machine, tmp_path, tensor_parallel_sizes=[1, 2, 4, 8])
    assert fitted.found == {TENSOR_PARALLEL: 4}
    assert [plan.server.gpus for plan in machine.starts] == [[0], [0, 1], [0, 1, 2, 3]]
    assert [tried.failed_because for tried in fitted.tries] == ["out of GPU memory", "out of GPU memory", None]
    assert not machine.loads


@pytest.mark.parametrize(
    "error",
    [
        ReleaseError("the weights are not complete", "restore them", "serve", kind="incomplete-model"),
        HostError("another program has the GPU's memory", "end it", "serve", kind="gpu-memory-in-use"),
        HostError("the disk is full", "free space", "serve"),
    ],
    ids=lambda error: error.kind or "no kind",
)
def test_what_more_gpus_do_not_mend_is_raised(tmp_path: Path, error: HostError | ReleaseError) -> None:
    machine = Machine(by_size({1: error, 2: 8}))
    with pytest.raises(type(error)) as raised:
        find(machine, tmp_path, tensor_parallel_sizes=[1, 2])
    assert raised.value is error
    assert len(machine.starts) == 1


def test_where_no_size_fits_each_is_reported(tmp_path: Path) -> None:
    machine = Machine(by_size({1: out_of_memory(problem="10 GiB are missing"), 2: out_of_memory(problem="2 GiB are missing")}))
    message = r"fits none of the tensor-parallel sizes \[1, 2\]"
    error = refused(machine, tmp_path, message, tensor_parallel_sizes=[1, 2])
    assert (error.log_tail, error.place) == (("10 GiB are missing", "2 GiB are missing"), "fit.tensor_parallel_sizes")
    assert [tried.failed_because for tried in kept(tmp_path)] == list(error.log_tail)


def test_a_size_above_the_machines_gpus_is_reported(tmp_path: Path) -> None:
    machine = Machine(by_size({4: out_of_memory()}))
    with pytest.raises(HostError, match="takes 8 GPUs, and this machine has 4 h200"):
        find(machine, tmp_path, tensor_parallel_sizes=[4, 8])


# --- as many requests as the KV cache holds


@pytest.mark.parametrize(
    ("holds", "wanted"),
    [
        pytest.param((8, 8), [8], id="another start confirms it"),
        pytest.param((9, 8, 8), [9, 8], id="more sequences leave the cache less"),
        pytest.param((9, 7, 6, 6), [9, 7, 6], id="and less again"),
        pytest.param((9, 7, 7), [9, 7], id="two less"),
        pytest.param((9, 7, 8), [9, 7], id="at last fewer sequences leave it more"),
    ],
)
def test_as_many_requests_as_the_cache_holds_are_confirmed_by_another_start(
    tmp_path: Path, holds: tuple[int, ...], wanted: list[int]
) -> None:
    machine = Machine(by_turn(*holds))
    fitted = find(machine, tmp_path, max_num_seqs=True)
    assert fitted.found == {SEQUENCES: wanted[-1]}
    assert machine.started == [{}, *({SEQUENCES: number} for number in wanted)]
    assert tuple(tried.holds for tried in fitted.tries) == holds
    failures = [f"its KV cache holds {held} requests" for held in holds[1:-1]]
    assert [tried.failed_because for tried in fitted.tries[1:-1]] == failures
    # Under the load of as many clients.
    assert [plan.load.max_concurrency for plan in machine.confirmed] == [wanted[-1]]
    assert not machine.loads


def test_a_cache_that_shrinks_with_each_start_is_given_up(tmp_path: Path) -> None:
    machine = Machine(by_turn(*range(20, 10, -1)))
    message = "5 numbers of max-num-seqs were tried, and the server takes none"
    error = refused(machine, tmp_path, message, max_num_seqs=True)
    assert len(machine.starts) == 1 + MOST_CONFIRMATIONS
    assert error.place == "fit.max_num_seqs"
    assert [*error.log_tail] == [f"max-num-seqs {size}: its KV cache holds {size - 1} requests" for size in range(20, 15, -1)]


def test_where_requests_are_preempted_there_are_fewer(tmp_path: Path) -> None:
    machine = Machine(lambda _: holding(64), preempts=lambda arguments: 3 * max(0, number_in(arguments, SEQUENCES) - 30))
    fitted = find(machine, tmp_path, max_num_seqs=True)
    assert fitted.found == {SEQUENCES: 27}
    assert [arguments.get(SEQUENCES) for arguments in machine.started] == [None, 64, 48, 36, 27]
    preempted = [f"{count} preemptions under the load" for count in (102, 54, 18)]
    assert [tried.failed_because for tried in kept(tmp_path)] == [None, *preempted, None]


@pytest.mark.parametrize(("holds", "tried"), [(64, [64, 48, 36, 27, 20]), (2, [2, 1]), (1, [1])])
def test_what_preempts_with_every_number_is_never_kept(tmp_path: Path, holds: int, tried: list[int]) -> None:
    machine = Machine(lambda _: holding(holds), preempts=lambda _: 1)
    error = refused(machine, tmp_path, f"{len(tried)} numbers of max-num-seqs were tried", max_num_seqs=True)
    assert [arguments.get(SEQUENCES) for arguments in machine.started] == [None, *tried]
    assert error.log_tail == tuple(f"max-num-seqs {number}: 1 preemptions under the load" for number in tried)
    assert error.place == "fit.max_num_seqs"


@pytest.mark.parametrize(
    ("caches", "message"),
    [
        pytest.param([KvCache(tokens=127, max_concurrency=None)], "has 127 tokens", id="too small"),
        pytest.param([KvCache(tokens=1000, max_concurrency=0.1, block_tok=1000)], "has 1,000 tokens", id="only its own block"),
        pytest.param([None], "has an unknown size", id="not told"),
        pytest.param([holding(8), holding(0)], "has 16 tokens", id="at the second start"),
    ],
)
def test_a_cache_without_room_for_one_request_is_reported(tmp_path: Path, caches: list[KvCache | None], message: str) -> None:
    left = iter(caches)
    whole = f"{message}, and does not hold one request of the workload"
    assert refused(Machine(lambda _: next(left)), tmp_path, whole, max_num_seqs=True).place == "fit.max_num_seqs"
    assert len(list(tmp_path.iterdir())) == len(caches)


@pytest.mark.parametrize("kind", TOO_SMALL)
@pytest.mark.parametrize("is_under_load", [False, True])
def test_a_server_that_runs_out_of_memory_with_what_was_found_gets_less(tmp_path: Path, kind: str, is_under_load: bool) -> None:
    def run(arguments: ServerArguments, *, loaded: bool) -> None:
        if loaded is is_under_load and number_in(arguments, SEQUENCES) > 300:
            raise out_of_memory(kind)

    def of(arguments: ServerArguments) -> KvCache:
        run(arguments, loaded=False)
        return holding(500)

    def preempts(arguments: ServerArguments) -> int:
        run(arguments, loaded=True)
        return 0

    fitted = find(Machine(of, preempts=preempts), tmp_path, max_num_seqs=True)
    assert fitted.found == {SEQUENCES: 281}
    assert [tried.arguments.get(SEQUENCES) for tried in fitted.tries] == [None, 500, 375, 281]
    assert [tried.failed_because for tried in fitted.tries] == [None, "out of GPU memory", "out of GPU memory", None]


@pytest.mark.parametrize(
    "error",
    [
        ReleaseError("an illegal memory access", "report it", "serve", kind="cuda-error"),
        HostError("it is not known whether requests were preempted", "see the log", "fit/try-2"),
    ],
    ids=lambda error: error.problem,
)
@pytest.mark.parametrize(
    ("fit", "tried"),
    [
        ({"max_num_seqs": True}, "try-2: the server was started with max-num-seqs 8"),
        ({"max_num_batched_tokens": [2048, 4096]}, "try-1: the server was started with max-num-batched-tokens 2048"),
    ],
)
def test_what_fewer_requests_do_not_mend_is_raised_with_what_was_tried(
    tmp_path: Path, error: HostError | ReleaseError, fit: dict[str, Any], tried: str
) -> None:
    def fail(_: ServerArguments) -> NoReturn:
        raise type(error)(error.problem, error.remedy, error.place, kind=error.kind)

    with pytest.raises(type(error), match=error.problem) as raised:
        find(Machine(preempts=fail, rates=fail), tmp_path, **fit)
    assert raised.value.__notes__ == [f"fit/{tried}"]


@pytest.mark.parametrize(
    ("tokens", "block", "spread", "holds"),
    [
        # A request has 128 tokens, 8 blocks; one block is the engine's own.
        (2 * 128, 16, 0.0, 1),
        (2 * 128 + 16, 16, 0.0, 2),
        (2 * 128 + 16, None, 0.0, 2),
        # One of 129 tokens: 2 blocks.
        (5 * 128, 128, 0.005, 2),
        (4 * 128, 128, 0.005, 1),
        # 115 + 39: 154, 10 blocks.
        (10 * 16 + 16, 16, 0.19, 1),
        (10 * 16 + 15, 16, 0.19, 0),
    ],
)
def test_a_request_of_the_most_tokens_takes_whole_blocks(
    tmp_path: Path, tokens: int, block: int | None, spread: float, holds: int
) -> None:
    machine = Machine(lambda _: KvCache(tokens=tokens, max_concurrency=None, block_tok=block))
    workload = LoadSettings(input_len=96, output_len=32, num_warmups=0, length_spread=spread)
    Fitting(plan_of(Fit(tensor_parallel_sizes=[1]), workload), machine.attempt, tmp_path).find()
    assert [tried.holds for tried in kept(tmp_path)] == [holds]


# --- the fastest


def test_the_fastest_is_the_one_with_the_highest_output_throughput(tmp_path: Path) -> None:
    """An invalid load is none."""
    invalid_one, sizes = "repeat 1: 3 preemptions", [2048, 4096, 8192, 16384]
    machine = Machine(rates=by_batch({2048: 90.0, 4096: 110.0, 8192: 100.0, 16384: invalid_one}))
    fitted = find(machine, tmp_path, max_num_batched_tokens=sizes)
    assert fitted.found == {BATCHED: 4096}
    assert machine.started == [plan.server.arguments for plan in machine.loads] == [{BATCHED: size} for size in sizes]
    assert [tried.output_throughput_tok_s for tried in fitted.tries] == [90.0, 110.0, 100.0, None]
    assert [tried.failed_because for tried in fitted.tries] == [None, None, None, invalid_one]


@pytest.mark.parametrize("kind", TOO_SMALL)
def test_one_that_does_not_fit_is_passed_over(tmp_path: Path, kind: str) -> None:
    def of(arguments: ServerArguments) -> KvCache:
        if arguments[BATCHED] == 8192:
            raise out_of_memory(kind)
        return holding(8)

    machine = Machine(of, by_batch({2048: 90.0, 4096: 80.0}))
    fitted = find(machine, tmp_path, max_num_batched_tokens=[2048, 4096, 8192])
    assert fitted.found == {BATCHED: 2048}
    assert (fitted.tries[2].failed_because, fitted.tries[2].kv_cache_tok) == ("out of GPU memory", None)


def test_where_every_load_is_invalid_each_is_reported(tmp_path: Path) -> None:
    machine = Machine(rates=by_batch({2048: "39 of 40 requests completed", 4096: "it lasted 0.1 s"}))
    message = r"no load of max_num_batched_tokens \[2048, 4096\] is valid"
    error = refused(machine, tmp_path, message, max_num_batched_tokens=[2048, 4096])
    assert error.log_tail == ("39 of 40 requests completed", "it lasted 0.1 s")


def test_each_is_found_with_those_before_it(tmp_path: Path) -> None:
    machine = Machine(by_size({1: out_of_memory(), 2: 24}), by_batch({2048: 90.0, 4096: 110.0}))
    about: dict[str, Any] = {"tensor_parallel_sizes": [1, 2], "max_num_seqs": True, "max_num_batched_tokens": [2048, 4096]}
    fitted = find(machine, tmp_path, **about)
    assert fitted.found == {TENSOR_PARALLEL: 2, SEQUENCES: 24, BATCHED: 4096}
    before = {TENSOR_PARALLEL: 2, SEQUENCES: 24}
    # The start that shows the size shows its cache, too.
    assert machine.started[:3] == [{TENSOR_PARALLEL: 1}, {TENSOR_PARALLEL: 2}, before]
    assert machine.started[3:] == [{**before, BATCHED: 2048}, {**before, BATCHED: 4096}]
    # What is measured is the load of the server that was found, with as many clients.
    assert [(plan.load.max_concurrency, plan.load.num_prompts) for plan in machine.loads] == [(24, 120)] * 2
    assert [plan.server.gpus for plan in machine.loads] == [[0, 1]] * 2


# --- what is left of it


def test_every_start_is_kept_in_a_folder_of_its_own(tmp_path: Path) -> None:
    machine = Machine(by_size({1: out_of_memory(), 2: 24}), by_batch({2048: 90.0, 4096: "it lasted 0.1 s"}))
    fitted = find(machine, tmp_path, tensor_parallel_sizes=[1, 2], max_num_batched_tokens=[2048, 4096])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["try-1", "try-2", "try-3", "try-4"]
    assert kept(tmp_path) == fitted.tries
    assert json.loads((tmp_path / "try-2" / "try.json").read_text()) == {
        "arguments": {TENSOR_PARALLEL: 2},
        "failed_because": None,
        "kv_cache_tok": (24 * BLOCKS + 1) * BLOCK_TOK,
        "holds": 24,
        "output_throughput_tok_s": None,
    }


def test_the_recipes_own_arguments_stay(tmp_path: Path) -> None:
    machine = Machine()
    server: dict[str, Any] = {SEQUENCES: 16, "dtype": "bfloat16"}
    plan = plan_of(Fit(tensor_parallel_sizes=[2]), **server)
    fitted = Fitting(plan, machine.attempt, tmp_path).find()
    assert machine.started == [{**server, TENSOR_PARALLEL: 2}]
    # What was found is written over them, and has nothing of them.
    assert fitted.found == {TENSOR_PARALLEL: 2}


@pytest.mark.parametrize(
    ("samples", "tokens"),
    [
        (['vllm:cache_config_info{block_size="128",engine="0"}'], 128),
        ([f'vllm:cache_config_info{{block_size="{size}",engine="{at}"}}' for at, size in enumerate((16, 528))], 528),
        (['vllm:cache_config_info{block_size="None",engine="0"}'], None),
        (['vllm:cache_config_info{block_size="0",engine="0"}'], None),
        (['vllm:cache_config_info{engine="0"}'], None),
        (['other_info{block_size="128"}'], None),
        ([], None),
    ],
)
def test_of_how_many_tokens_a_block_is_is_on_the_metrics_page(samples: list[str], tokens: int | None) -> None:
    lines = ["# TYPE vllm:cache_config_info gauge", *(f"{sample} 1.0" for sample in samples)]
    assert block_tok("\n".join([*lines, ""]) if samples else "") == tokens
