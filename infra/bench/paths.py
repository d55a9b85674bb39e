"""How surely the paths show a fault of a busy server, how often they refuse a healthy one, and how long they hold a server.

    .venv/bin/python -m infra.bench.paths [--releases 40] [--healthy 200] [--rounds 3]

`caught` has each fault with the share of releases that its path refused, `false_alarm` is the share of healthy releases that
any path refused. Both are simulated: a server with a cache in blocks (tests/fakes/block_cache.py) is asked by the product's own
stage with its default settings, 64 clients at once. Its likelihoods and their noise are as on an H200 (docs/measured.md).
`extra_held` is of the real engine: how long `reference-chat` holds its server with the paths, over without, as the median of
rounds in turns. The last line is one JSON object.
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
from vllm_qualify.evidence.paths.measure import Asker
from vllm_qualify.evidence.paths.replies import Prompt
from vllm_qualify.recipe.contract import Capability
from vllm_qualify.recipe.metrics import PATH_METRICS
from vllm_qualify.recipe.paths import Paths
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
)
HEALTHY = Planted("none", 1, PATH_METRICS)


class Release(NamedTuple):
    planted: Planted
    noise: Sequence[float]
    seed: int


def is_refused(release: Release) -> bool:
    """Whether one of the paths that must refuse the fault does not pass."""
    drawn, (planted, weights, seed) = random.Random(release.seed), release
    steps = range(len(weights))

    def noise(of: random.Random) -> float:
        # The difference of two replies has the noise of both.
        return of.choice((-1, 1)) * of.choices(steps, weights)[0] / 16 / 2**0.5

    cache = BlockCache(planted.fault, blocks=BLOCKS, one_in=planted.one_in, noise=noise, gaps_nat=GAPS_NAT, seed=seed)
    prompts = [Prompt(number, " ".join(drawn.choices(WORDS, k=200))) for number in range(Paths().num_prompts)]
    with TemporaryDirectory() as folder:
        asker = Asker(Paths(), prompts, MODEL_NAME, "salt", PROMISED)
        rows = measured_of(Path(folder) / "paths", cache, asker, AT_ONCE)
    return any(rows[path].value != 1 for path in planted.paths if path in rows)


def share_refused(planted: Planted, count: int, pool: ProcessPoolExecutor) -> float:
    releases = [Release(planted, (NOISE_BF16, NOISE_FP8)[seed % 2], seed) for seed in range(count)]
    return sum(pool.map(is_refused, releases)) / count


def held_s(folder: Path, paths: Document | None) -> float:
    """How long a run of `reference-chat` holds its server."""
    document: Document = YAML(typ="safe").load(recipe(folder, MODEL, {}).read_text())
    profiles = document["gpu_types"]["cpu"]["profiles"]
    profiles.pop("traffic")
    profiles["chats"] |= {"paths": paths}
    home = folder / "home"
    environment = os.environ | {"VLLM_QUALIFY_HOME": str(home)}
    command = [str(Path(sys.executable).parent / "vllm-qualify"), "run", str(write(document, folder / "recipe.yaml"))]
    subprocess.run(command, env=environment, check=True, capture_output=True)
    (run,) = (home / "runs").iterdir()
    return next(stage.duration_s for stage in load_report(run).stages if stage.stage == "serve")


def extra_held(rounds: int) -> float | None:
    ratios = []
    for _ in range(rounds):
        with TemporaryDirectory() as without, TemporaryDirectory() as with_paths:
            ratios.append(held_s(Path(with_paths), {"num_prompts": 64}) / held_s(Path(without), None))
    return statistics.median(ratios) if ratios else None


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--releases", type=int, default=40, help="how many with each fault")
    options.add_argument("--healthy", type=int, default=200, help="how many without one")
    options.add_argument("--rounds", type=int, default=3, help="how often the real engine is held, with the paths and without")
    asked = options.parse_args()
    with ProcessPoolExecutor() as pool:
        caught = {planted.fault: share_refused(planted, asked.releases, pool) for planted in FAULTS}
        for fault, share in caught.items():
            print(f"{fault}: {share:.1%} of {asked.releases} refused", flush=True)
        false_alarm = share_refused(HEALTHY, asked.healthy, pool)
    print(f"healthy: {false_alarm:.1%} of {asked.healthy} refused", flush=True)
    print(json.dumps({"caught": caught, "false_alarm": false_alarm, "extra_held": extra_held(asked.rounds)}))


if __name__ == "__main__":
    main()
