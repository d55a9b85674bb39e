"""How often `recipe check` errs about the commands of vllm-project/recipes, by what each version of vLLM itself says of them.

    .venv/bin/python -m infra.bench.imports --recipes FOLDER --engine 0.12.0=ENV --engine 0.33.0=ENV …

FOLDER is a checkout of vllm-project/recipes, and each ENV the folder of an environment that has this version of vLLM; a CPU
build is enough. Every variant of every YAML is imported as `recipe import` does it, and checked against the version's table as
`recipe check --vllm` does it. Then the published words and variables are given to `vllm serve` of that version, up to where it
would read the model (vllm_serve.py). A bound on versions is ignored, so that every command is compared at every version.

Rows that differ are printed, and last a line of JSON. For each version it has the `commands`, how many `fit` and how many are
`refused_by_both`, the `false_refusals`, the `false_fits`, of how many the check is `unsure`, and for how many the publisher
wants a newer vLLM (`for_newer`). The exit code is 1 if a row differs. Three versions take two minutes on two cores.
"""

import argparse
import json
import re
import shlex
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from vllm_qualify.drift.candidate import Candidate, find_candidate
from vllm_qualify.drift.check import Checked, check_recipe
from vllm_qualify.errors import CallerError, HostError, QualifyError
from vllm_qualify.plan.choice import Choice
from vllm_qualify.recipe.importing import import_recipe, write_recipe
from vllm_qualify.recipe.importing.combination import gathered_yaml
from vllm_qualify.recipe.importing.documents import read_yaml
from vllm_qualify.recipe.loading import load_recipe
from vllm_qualify.recipe.recipe import LoadedRecipe

SERVE = Path(__file__).with_name("vllm_serve.py")
CPU = "cpu"
# Any gate will do: it says nothing of the server.
GATE: dict[str, Any] = {"exact_match_minimum": 0.5, "exact_match_filter": "strict-match"}
LIMIT_S = 900
FIT, REFUSED, FALSE_REFUSAL, FALSE_FIT, UNSURE = "fit", "refused_by_both", "false_refusals", "false_fits", "unsure"


class Published(NamedTuple):
    """A published command: its file, variant and GPU type, its words after `vllm serve`, and the recipe that it is part of."""

    source: str
    gpu_type: str
    words: list[str]
    environment: dict[str, str]
    loaded: LoadedRecipe

    @property
    def key(self) -> str:
        return json.dumps([self.gpu_type == CPU, self.words, self.environment], sort_keys=True)


class Asked(NamedTuple):
    """A version, by its table and by the Python that has it."""

    candidate: Candidate
    python: Path


class Row(NamedTuple):
    """A published command with both answers: what the check says against it, and vLLM's refusal."""

    command: Published
    outcome: str
    problems: list[str]
    refusal: str | None


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    try:
        with tempfile.TemporaryDirectory() as scratch:
            return _compare(options.recipes, [_named(text) for text in options.engine], Path(scratch))
    except QualifyError as error:
        print(error, file=sys.stderr)
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m infra.bench.imports", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--recipes", type=Path, required=True, help="a checkout of vllm-project/recipes")
    parser.add_argument("--engine", action="append", required=True, metavar="VERSION=ENV", help="may be given several times")
    return parser


def _named(text: str) -> Asked:
    version, _, folder = text.partition("=")
    python = Path(folder) / "bin" / "python"
    if not folder or not python.is_file():
        remedy = f"python3 -m venv ENV; ENV/bin/python -m pip install vllm=={version}; and give --engine {version}=ENV"
        raise CallerError(f"there is no Python at {python}", remedy, "--engine")
    return Asked(find_candidate(version, None, None, _say), python.absolute())


def _compare(recipes: Path, engines: list[Asked], scratch: Path) -> int:
    if not (recipes / "models").is_dir():
        remedy = "git clone https://github.com/vllm-project/recipes, and give its folder"
        raise CallerError(f"there is no folder models in {recipes}", remedy, "--recipes")
    refused = Counter[str]()
    commands = list(published(recipes, scratch, refused))
    for reason, count in refused.most_common():
        _say(f"not imported: {count} times {reason}")
    counts = {asked.candidate.version: _counts(asked, commands, scratch) for asked in engines}
    print(json.dumps({"not_imported": refused.total(), **counts}))
    return 1 if any(count[FALSE_REFUSAL] or count[FALSE_FIT] for count in counts.values()) else 0


def published(recipes: Path, scratch: Path, refused: Counter[str]) -> Iterator[Published]:
    """The commands of every variant that can be imported. `refused` gets the reasons why others cannot."""
    for file in sorted(recipes.glob("models/*/*.yaml")):
        for variant in read_yaml(file)["variants"].mapping():
            try:
                imported = import_recipe(file, variant=variant, **GATE)
            except CallerError as error:
                refused[error.problem] += 1
                continue
            path = scratch / f"{file.parent.name}-{file.stem}-{variant}.yaml"
            write_recipe(imported, path)
            loaded, source = load_recipe(str(path)), f"{file.relative_to(recipes)}, variant {variant}"
            for one in gathered_yaml(file, variant, None).commands:
                command = one.command
                yield Published(source, command.gpu_type, _as_a_shell(command.words), command.environment, loaded)


def _as_a_shell(words: list[str]) -> list[str]:
    """Some words are an option and its value. recipes shows them without quotes, so that a shell makes two of them."""
    return [part for word in words for part in (shlex.split(word) if re.fullmatch(r"--[\w.-]+\s+[\w.-]+", word) else [word])]


def _counts(asked: Asked, commands: list[Published], scratch: Path) -> dict[str, int]:
    rows, version = compared(asked, commands, scratch), asked.candidate.version
    for row in rows:
        if row.outcome in (FALSE_REFUSAL, FALSE_FIT):
            print(f"{row.outcome} at {version}: {row.command.source}, {row.command.gpu_type}")
            print(f"  recipe check: {'; '.join(row.problems) or 'fits'}\n  vllm serve:   {row.refusal or 'takes it'}")
    outcomes = Counter(row.outcome for row in rows)
    newer = sum(not _is_for(row.command.loaded, version) for row in rows)
    by_outcome = {name: outcomes[name] for name in (FIT, REFUSED, FALSE_REFUSAL, FALSE_FIT, UNSURE)}
    return {"commands": len(rows)} | by_outcome | {"for_newer": newer}


def compared(asked: Asked, commands: list[Published], scratch: Path) -> list[Row]:
    """Each command with both answers. Raises HostError if the environment gives none."""
    refusals: dict[str, str | None] = {}
    for is_cpu in (False, True):
        different = {command.key: command for command in commands if (command.gpu_type == CPU) == is_cpu}
        if different:
            refusals |= dict(zip(different, _refusals(asked, list(different.values())), strict=True))
    return [_row(command, checked(command, asked.candidate, scratch), refusals[command.key]) for command in commands]


def _refusals(asked: Asked, commands: list[Published]) -> list[str | None]:
    candidate, python = asked
    question = {
        "gpu": commands[0].gpu_type != CPU,
        "commands": [{"words": command.words, "environment": command.environment} for command in commands],
    }
    _say(f"asking vLLM {candidate.version} about {len(commands)} commands")
    done = subprocess.run(
        [python, "-I", SERVE], input=json.dumps(question), capture_output=True, text=True, timeout=LIMIT_S, check=False
    )
    if done.returncode:
        problem = f"{python} did not answer"
        raise HostError(problem, "see what it wrote", "--engine", done.stderr.splitlines()[-10:])
    answer = json.loads(done.stdout)
    if answer["version"].partition("+")[0] != candidate.version:
        problem = f"{python} has vLLM {answer['version']}"
        raise CallerError(problem, f"give an environment with vLLM {candidate.version}", "--engine")
    refusals: list[str | None] = answer["refusals"]
    return refusals


def checked(command: Published, candidate: Candidate, scratch: Path) -> Checked:
    """The answer of `recipe check` for the command's GPU type, whatever versions the recipe is for."""
    recipe = command.loaded.recipe
    variants = {name: variant.model_copy(update={"vllm": None}) for name, variant in recipe.variants.items()}
    anywhere = command.loaded.model_copy(update={"recipe": recipe.model_copy(update={"variants": variants})})
    return check_recipe(anywhere, Choice(gpu_type=command.gpu_type), candidate, scratch, allow_code=True)


def _is_for(loaded: LoadedRecipe, version: str) -> bool:
    return all(variant.fits_version(version) for variant in loaded.recipe.variants.values())


def _row(command: Published, answer: Checked, refusal: str | None) -> Row:
    problems = [each.finding.told for each in answer.problems]
    if answer.fits is None:
        outcome = UNSURE
    elif answer.fits:
        outcome = FALSE_FIT if refusal else FIT
    else:
        outcome = REFUSED if refusal else FALSE_REFUSAL
    return Row(command, outcome, problems, refusal)


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
