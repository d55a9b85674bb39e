"""How surely the paths show a fault of a busy server, how often they refuse a healthy one, and how long they hold a server.

    .venv/bin/python -m infra.bench.paths [--releases 40] [--healthy 200] [--real 20] [--rounds 3]

`caught` has each fault with the share of releases that its path refused, `false_alarm` is the share of healthy releases that
any path refused, and `unproven` the share of those with a path that was not judged. All are simulated: a server with a cache in
blocks (tests/fakes/block_cache.py) is asked by the product's own stage with the paths of a recipe that says nothing of them.
A path that is not proven refuses nothing there. Its likelihoods and their noise are as on an H200 (docs/measured.md).
`false_alarm_real` is of the real engine: the share of so many measurements of the paths of `reference-chat`, on one server and
with new salts each, of which any path was refused. So is `extra_held`: how long a candidate of that recipe, compared with a
baseline, holds its servers with the recipe's paths, over without, as the median of rounds in turns. The last line is one JSON
object.
"""

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

from ruamel.yaml import YAML

from tests.builders.chat_model import MODEL, recipe
from tests.builders.paths import measured_of
from tests.fakes.block_cache import MODEL as MODEL_NAME
from tests.fakes.block_cache import BlockCache, Fault
from tests.recipes import Document, write
from vllm_qualify.engine.provision import Launch, find_engines, read_machine
from vllm_qualify.engine.server_start import serve
from vllm_qualify.evidence.paths.measure import Asker, decide_how, measure_paths
from vllm_qualify.evidence.paths.parse import parse_paths
from vllm_qualify.evidence.paths.replies import Prompt
from vllm_qualify.evidence.sequential import Levels
from vllm_qualify.evidence.stages.paths import make_asker
from vllm_qualify.plan.cells import plan_cells
from vllm_qualify.plan.choice import Choice
from vllm_qualify.recipe.contract import Capability
from vllm_qualify.recipe.loading import catalog_folder, load_recipe
from vllm_qualify.recipe.metrics import AWAKE, CONSTRAINED, PATHS, path_metric
from vllm_qualify.recipe.paths import UNASKED
from vllm_qualify.report.model import load_report

AT_ONCE, BLOCKS = 64, 4096
PROMISED: tuple[Capability, ...] = ("chat", "tools", "json_schema")
WORDS = [f"word{number}" for number in range(20)]
# How often one likelihood differed by so many sixteenths of a nat between two passes of Llama 3.1 8B's shape with peaked random
# weights, on an H200 (docs/measured.md): in BF16, and with an FP8 KV cache.
NOISE_BF16 = (
    0.611,
    0.1,
    0.097,
    0.053,
    0.054,
    0.028,
    0.025,
    0.0113,
    0.0099,
    0.0041,
    0.0026,
    0.0015,
    0.0009,
    0.0005,
    0.0002,
    0.0002,
)
NOISE_FP8 = (0.484, 0.112, 0.105, 0.075, 0.068, 0.042, 0.037, 0.024, 0.018, 0.011, 0.0094, 0.0044, 0.0051, 0.0021, 0.002)
# By how much the second token was less likely than the first, in tenths of the places of these servers.
GAPS_NAT = (0.125, 0.25, 0.5, 0.625, 0.94, 1.25, 1.75, 2.6, 4.1)


class Planted(NamedTuple):
    """A fault, and how rare it is. One of `paths` must refuse it."""

    fault: Fault
    one_in: int
    paths: tuple[str, ...]


FAULTS = (
    Planted("swapped", 16, ("path_concurrent",)),
    Planted("corrupt block", 200, ("path_cached",)),
    Planted("stale block", 200, ("path_evicted",)),
    Planted("leaking aborts", 1, ("path_aborted",)),
    Planted("cut JSON", 50, ("path_constrained",)),
    Planted("lost call", 100, ("path_constrained",)),
    Planted("shared salts", 1, ("path_cold",)),
    Planted("stale memory", 1, ("path_awake",)),
)
HEALTHY = Planted("none", 1, tuple(path_metric(path) for path in (*PATHS, CONSTRAINED)))


class Release(NamedTuple):
    planted: Planted
    noise: Sequence[float]
    seed: int


class Shown(NamedTuple):
    """Whether a path that must refuse a fault refused it, and whether such a path was not judged, since nothing proved it."""

    is_refused: bool
    is_unproven: bool


def judge(release: Release) -> Shown:
    drawn, (planted, weights, seed) = random.Random(release.seed), release
    steps = range(len(weights))

    def noise(of: random.Random) -> float:
        # The difference of two replies has the noise of both.
        return of.choice((-1, 1)) * of.choices(steps, weights)[0] / 16 / 2**0.5

    cache = BlockCache(planted.fault, blocks=BLOCKS, one_in=planted.one_in, noise=noise, gaps_nat=GAPS_NAT, seed=seed)
    prompts = [Prompt(number, " ".join(drawn.choices(WORDS, k=200))) for number in range(UNASKED.num_prompts)]
    with TemporaryDirectory() as folder:
        sleeps = path_metric(AWAKE) in planted.paths
        asker = Asker(UNASKED, prompts, MODEL_NAME, "salt", PROMISED, sleeps=sleeps)
        rows = measured_of(Path(folder) / "paths", cache, asker, AT_ONCE)
    judged = [rows[path] for path in planted.paths if path in rows]
    return Shown(
        is_refused=any(row.value != 1 and not row.is_unproven for row in judged),
        is_unproven=any(row.is_unproven for row in judged),
    )


def judge_all(planted: Planted, count: int, pool: ProcessPoolExecutor) -> tuple[float, float]:
    """The share of releases that were refused, and that of releases with a path that was not judged."""
    releases = [Release(planted, (NOISE_BF16, NOISE_FP8)[seed % 2], seed) for seed in range(count)]
    shown = [*pool.map(judge, releases)]
    return sum(each.is_refused for each in shown) / count, sum(each.is_unproven for each in shown) / count


def measure_real(count: int) -> float | None:
    """The share of measurements that refused a path of the healthy engine."""
    if not count:
        return None
    refused = 0
    with TemporaryDirectory() as name:
        folder = Path(name)
        loaded, engines = load_recipe(str(recipe(folder, MODEL, {}))), find_engines(Launch())
        (plan,) = plan_cells(loaded, Choice(profile="chats"), engines, read_machine(engines.engine, "cpu"))
        settings = plan.paths or UNASKED
        lines = (catalog_folder() / "reference" / "test.jsonl").read_text().splitlines()[: settings.num_prompts]
        contents = [[{"role": "user", "content": json.loads(line)["question"]}] for line in lines]
        with serve(plan.server, folder, print) as server:
            for number in range(count):
                inside = folder / f"paths-{number}"
                inside.mkdir()
                how = decide_how(server, contents, settings, has_forms=True)
                asker = make_asker(plan, contents, how)
                measure_paths(server, asker, settings.num_concurrent or AT_ONCE, inside, lambda _: None)
                rows = parse_paths(inside, asker, settings.num_concurrent or AT_ONCE, plan.server.engine_kind, Levels())
                # The recipe asks for the paths: one that is not proven is refused, too.
                gates = [row for row in rows if row.metric in HEALTHY.paths]
                wrong = [f"{row.metric}: {row.finding or row.invalid_because}" for row in gates if row.value != 1]
                print(f"real {number + 1}: {'; '.join(wrong) or f'{len(gates)} paths hold'}", flush=True)
                refused += bool(wrong)
    return refused / count


class Held(NamedTuple):
    """How long the candidates of a run held their servers, and of that the paths, in s."""

    all_s: float
    paths_s: float


def compared_recipe(folder: Path) -> Document:
    """`reference-chat`, whose answers are compared with a baseline's."""
    document: Document = YAML(typ="safe").load(recipe(folder, MODEL, {}).read_text())
    document["gates"] = [{"metric": "exact_match", "filter": "strict-match", "max_loss": 0.02, "unit": "fraction"}]
    return document


def qualify(folder: Path, document: Document, *options: str) -> list[Path]:
    """Run the recipe in the folder's home and store; the folders of its cells' runs."""
    runs = folder / "home" / "runs"
    before = {*runs.glob("*")}
    call(folder, "run", str(write(document, folder / "recipe.yaml")), "--gpu-type", "cpu", *options)
    return sorted({*runs.glob("*")} - before)


def call(folder: Path, *words: str) -> None:
    private = folder / "approval.key"
    keys = {"VLLM_QUALIFY_PRIVATE_KEY_FILE": str(private), "VLLM_QUALIFY_PUBLIC_KEY_FILE": f"{private}.pub"}
    environment = os.environ | keys | {"VLLM_QUALIFY_HOME": str(folder / "home")}
    subprocess.run([sys.executable, "-m", "vllm_qualify", *words], env=environment, check=True, capture_output=True)


def hold(folder: Path, document: Document) -> Held:
    """Both cells share each start of the server, so the one that took longer tells how long that was."""
    cells = [{of.stage: of.duration_s for of in load_report(run).stages} for run in qualify(folder, document)]
    held_s = max(cell["serve"] + cell.get("starts", 0.0) for cell in cells)
    return Held(held_s, sum(cell.get("paths", 0.0) for cell in cells))


def extra_held(rounds: int, are_paths_first: bool = True) -> float | None:
    """The median over the rounds of how long the servers were held with the paths, over without. The order changes in turns."""
    if not rounds:
        return None
    ratios = []
    with TemporaryDirectory() as name:
        folder = Path(name)
        with_paths, without = compared_recipe(folder), compared_recipe(folder)
        without["gpu_types"]["cpu"]["profiles"]["chats"]["paths"] = False
        call(folder, "key", "new", str(folder / "approval.key"), "--no-passphrase")
        for baseline in qualify(folder, without, "--establish-baseline"):
            call(folder, "approve", baseline.name, "--by", "bench", "--reason", "to be compared with")
        for number in range(rounds):
            if (number % 2 == 0) == are_paths_first:
                ours, theirs = hold(folder, with_paths), hold(folder, without)
            else:
                theirs, ours = hold(folder, without), hold(folder, with_paths)
            print(
                f"held {ours.all_s:.0f} s, of it {ours.paths_s:.0f} s for the paths; without {theirs.all_s:.0f} s", flush=True
            )
            ratios.append(ours.all_s / theirs.all_s)
    return statistics.median(ratios)


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--releases", type=int, default=40, help="how many with each fault")
    options.add_argument("--healthy", type=int, default=200, help="how many without one")
    options.add_argument("--real", type=int, default=20, help="how many measurements of the healthy real engine")
    options.add_argument("--rounds", type=int, default=3, help="how often the real engine is held, with the paths and without")
    asked = options.parse_args()
    # A release waits for its server a third of the time.
    with ProcessPoolExecutor(2 * len(os.sched_getaffinity(0))) as pool:
        caught = {}
        for planted in FAULTS:
            caught[planted.fault], _ = judge_all(planted, asked.releases, pool)
            print(f"{planted.fault}: {caught[planted.fault]:.1%} of {asked.releases} refused", flush=True)
        false_alarm, unproven = judge_all(HEALTHY, asked.healthy, pool)
    print(f"healthy: {false_alarm:.1%} of {asked.healthy} refused, {unproven:.1%} not judged on every path", flush=True)
    shown = {"caught": caught, "false_alarm": false_alarm, "unproven": unproven}
    real = {"false_alarm_real": measure_real(asked.real), "extra_held": extra_held(asked.rounds)}
    print(json.dumps(shown | real))


if __name__ == "__main__":
    main()
