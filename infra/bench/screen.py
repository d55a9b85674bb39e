"""What a screen by likelihoods sees of real builds, beside exact match: a table, measured on the reference model.

    python -m infra.bench.screen FOLDER

Each build is served, answers the reference's 500 questions, and scores the answers of the good build. What was measured is kept
in FOLDER, so that a second call measures only what is missing. It needs the engine environment, and a quiet machine: about two
minutes a build on two cores.
"""

import argparse
import json
import random
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

import numpy as np

from vllm_qualify.answers import ask_within
from vllm_qualify.engine.environment import find_engine
from vllm_qualify.engine.server import Server, ServerPlan
from vllm_qualify.evidence.likelihood import Scored, measure_likelihood, per_token, read_scored
from vllm_qualify.evidence.passages import Passage
from vllm_qualify.evidence.sequential import Sides
from vllm_qualify.evidence.serving import serving_alone
from vllm_qualify.judge.compare.likelihoods import nll_increase, top1_agreement
from vllm_qualify.recipe.loading import catalog_folder

REFERENCE, SCRIPTS = catalog_folder() / "reference", Path(__file__).parents[1] / "reference_model"
NAME, GOOD, STOP = "reference", "good", "Question:"
WEIGHTS, REPLIES, SCORES = "model.safetensors", "replies.json", "scores.jsonl"
SHOTS, MOST_TOKENS, CLIENTS, LIMIT_S = 5, 128, 32, 300.0
# gsm8k's strict-match, as lm-eval has it.
ANSWER = re.compile(r"#### (\-?[0-9\.\,]+)")
# The chance that the true mean is below an interval, and above it.
AT = Sides(0.01, 0.01)
# A build is seen with so many answers if in SURELY of the draws the whole interval is on the bad side of zero.
ANSWERS, DRAWS, SURELY = (10, 25, 50, 100, 200, 400), 400, 0.95


class ScreenBuild(NamedTuple):
    """One build: how its weights are made, its KV cache, how its prompts are put together, and how it answers.

    Builds whose `server` is the same are asked of one, which loads their weights one after another. `start` tells starts apart.
    """

    name: str
    weights: tuple[str, ...] = ()
    kv_cache: str = "auto"
    between: str = "\n\n"
    temperature: float = 0.0
    stop: tuple[str, ...] = (STOP,)
    start: int = 1

    @property
    def server(self) -> tuple[object, ...]:
        return (self.kv_cache, self.start)

    @property
    def folder(self) -> str:
        return re.sub(r"\W+", "-", self.name)


FP8 = "fp8_e4m3"
BUILDS = (
    ScreenBuild(GOOD),
    ScreenBuild("another template", between="\n"),
    ScreenBuild("temperature 1 by default", temperature=1.0),
    ScreenBuild("never stops", stop=()),
    *(ScreenBuild(f"rounded to {levels} steps", ("regress.py", "--levels", f"{levels}")) for levels in (15, 9, 7, 6, 5)),
    ScreenBuild("started again", start=2),
    ScreenBuild("FP8 KV cache", kv_cache=FP8),
    ScreenBuild("FP8 KV cache, scale off by 128", ("rescale.py", "--factor", f"{1 / 128}"), FP8),
)


class ScreenProblem(NamedTuple):
    """A question after solved ones, and its answer."""

    shots: list[str]
    question: str
    answer: str

    def prompt(self, between: str) -> str:
        return between.join([*self.shots, f"Question: {self.question}\nAnswer:"])


class ScreenMeasured(NamedTuple):
    """Whether each question was answered exactly, and the scores of the good build's replies."""

    right: list[float]
    scores: list[Scored]


class ScreenRow(NamedTuple):
    """What the screen and exact match see of a build. `needed` are numbers of answers; None if all of them do not suffice."""

    name: str
    right: float
    lost: float
    needed_by_match: int | None
    increase: float
    interval: str
    needed: int | None
    agreement: float


def screen_problems() -> list[ScreenProblem]:
    """The reference's questions, each with other shots, the same ones in each call."""
    test, train = (_read(REFERENCE / f"{name}.jsonl") for name in ("test", "train"))
    made = []
    for number, asked_for in enumerate(test):
        shots = random.Random(number).sample(train, SHOTS)
        solved = [f"Question: {shot['question']}\nAnswer: {shot['answer']}" for shot in shots]
        made.append(ScreenProblem(solved, asked_for["question"], asked_for["answer"]))
    return made


def _read(path: Path) -> list[dict[str, str]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def measure(builds: Sequence[ScreenBuild], folder: Path, asked_for: Sequence[ScreenProblem]) -> None:
    """Measure builds of one server that FOLDER does not have yet. The good build comes before all others."""
    missing = [build for build in builds if not (folder / build.folder / SCORES).exists()]
    if not missing:
        return
    of_server = folder / "server"
    shutil.rmtree(of_server, ignore_errors=True)
    served = of_server / "model"
    shutil.copytree(REFERENCE / "model", served)
    with serving_alone(_server_plan(missing[0], served), of_server, {"run": "screen"}, _tell) as server:
        for build in missing:
            _tell(build.name)
            inside = folder / build.folder
            inside.mkdir(exist_ok=True)
            _load(server, _weights(build, inside), served)
            (inside / REPLIES).write_text(json.dumps(_answered(server, build, asked_for)))
            unfinished = inside / f"{SCORES}.unfinished"
            measure_likelihood(server, _passages(folder, asked_for, build), unfinished, LIMIT_S, _silent)
            unfinished.rename(inside / SCORES)


def _weights(build: ScreenBuild, folder: Path) -> Path:
    """The folder with the build's weights, which are made first."""
    if not build.weights:
        return REFERENCE / "model"
    script, *others = build.weights
    model = folder / "model"
    command = [str(find_engine().python), str(SCRIPTS / script), str(REFERENCE / "model"), str(model), *others]
    subprocess.run(command, check=True)
    return model


def _load(server: Server, weights: Path, served: Path) -> None:
    """Put other weights into the folder that the server reads, and let it load them: a start takes much longer."""
    fresh = shutil.copy(weights / WEIGHTS, served / f".{WEIGHTS}")
    Path(fresh).replace(served / WEIGHTS)
    ask_within("POST", f"{server.url}/collective_rpc", LIMIT_S, json={"method": "reload_weights"}).raise_for_status()


def measured(build: ScreenBuild, folder: Path, asked_for: Sequence[ScreenProblem]) -> ScreenMeasured:
    replies = _replies(folder / build.folder)
    return ScreenMeasured(
        right=[float(_is_right(reply, problem)) for reply, problem in zip(replies, asked_for, strict=True)],
        scores=read_scored(folder / build.folder / SCORES, _passages(folder, asked_for, build), NAME),
    )


def _server_plan(build: ScreenBuild, served: Path) -> ServerPlan:
    """As the reference's recipe serves it."""
    return ServerPlan(
        engine=find_engine(),
        model=str(served),
        revision=None,
        served_model_name=NAME,
        arguments={
            "dtype": "float32",
            "max-model-len": 2048,
            "enforce-eager": True,
            "no-enable-prefix-caching": True,
            "max-num-seqs": CLIENTS,
            "kv-cache-dtype": build.kv_cache,
        },
        # Its interface for developers lets it load other weights.
        environment={"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_SERVER_DEV_MODE": "1"},
        startup_timeout_s=600.0,
    )


def _answered(server: Server, build: ScreenBuild, asked_for: Sequence[ScreenProblem]) -> list[str]:
    with ThreadPoolExecutor(CLIENTS) as clients:
        return list(clients.map(partial(_reply, server, build), asked_for))


def _reply(server: Server, build: ScreenBuild, problem: ScreenProblem) -> str:
    request = {
        "model": NAME,
        "prompt": problem.prompt(build.between),
        "max_tokens": MOST_TOKENS,
        "temperature": build.temperature,
        "stop": list(build.stop),
    }
    reply = ask_within("POST", f"{server.url}/v1/completions", LIMIT_S, json=request).raise_for_status().json()
    text: str = reply["choices"][0]["text"]
    return text


def _replies(folder: Path) -> list[str]:
    replies: list[str] = json.loads((folder / REPLIES).read_text())
    return replies


def _passages(folder: Path, asked_for: Sequence[ScreenProblem], build: ScreenBuild) -> list[Passage]:
    """The good build's replies, after the prompts as this build puts them together."""
    pairs = enumerate(zip(asked_for, _replies(folder / GOOD), strict=True))
    return [Passage("gsm8k", number, problem.prompt(build.between), reply) for number, (problem, reply) in pairs]


def _is_right(reply: str, problem: ScreenProblem) -> bool:
    answer = ANSWER.search(reply)
    wanted = ANSWER.search(problem.answer)
    return answer is not None and wanted is not None and answer[1] == wanted[1]


def row_of(build: ScreenBuild, good: ScreenMeasured, other: ScreenMeasured) -> ScreenRow:
    lost = [before - now for before, now in zip(good.right, other.right, strict=True)]
    gained = [now.nll_nat - then.nll_nat for then, now in zip(good.scores, other.scores, strict=True)]
    tokens = [len(scored.tokens) for scored in good.scores]
    value, interval = nll_increase(good.scores, other.scores, AT)
    return ScreenRow(
        name=build.name,
        right=float(np.mean(other.right)),
        lost=float(np.mean(lost)),
        needed_by_match=answers_needed(lost, [1] * len(lost)),
        increase=value,
        interval=f"{interval.lower:.5f} to {interval.upper:.5f}" if interval else "",
        needed=answers_needed(gained, tokens),
        agreement=top1_agreement(good.scores, other.scores, AT)[0],
    )


def answers_needed(worse: Sequence[float], weights: Sequence[int]) -> int | None:
    """How many answers it takes to see that a build is worse: drawn at random without replacement, in SURELY of DRAWS draws."""
    random_draws = np.random.default_rng(1)
    for number in (*ANSWERS, len(worse)):
        if number == len(worse):
            return number if _is_seen(worse, weights) else None
        draws = (random_draws.choice(len(worse), number, replace=False) for _ in range(DRAWS))
        seen = sum(_is_seen([worse[at] for at in drawn], [weights[at] for at in drawn]) for drawn in draws)
        if seen >= SURELY * DRAWS:
            return number
    return None


def _is_seen(worse: Sequence[float], weights: Sequence[int]) -> bool:
    _, interval = per_token(worse, weights, AT)
    return interval is not None and interval.lower > 0


def table(rows: Sequence[ScreenRow]) -> Iterator[str]:
    yield "| build | exact match | lost | seen with | increase, nat/tok | interval | seen with | same likeliest token |"
    yield "|---|---|---|---|---|---|---|---|"
    for row in rows:
        yield (
            f"| {row.name} | {row.right:.1%} | {100 * row.lost:.1f} pp | {row.needed_by_match or '—'} | {row.increase:.5f} |"
            f" {row.interval} | {row.needed or '—'} | {row.agreement:.3%} |"
        )


def _tell(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _silent(_done: int, _total: int, _part: str = "", /) -> None:
    """Tell nothing of each request."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="where the measurements are kept")
    folder = parser.parse_args().folder.resolve()
    asked_for = screen_problems()
    for _, builds in groupby(BUILDS, key=lambda build: build.server):
        measure(list(builds), folder, asked_for)
    results = [measured(build, folder, asked_for) for build in BUILDS]
    print("\n".join(table([row_of(build, results[0], other) for build, other in zip(BUILDS, results, strict=True)])))


if __name__ == "__main__":
    main()
