"""Ask a version of vLLM, by its own code, what it makes of servers' options. No GPU is used. Answers are kept."""

import hashlib
import json
import os
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from vllm_qualify.drift import probe
from vllm_qualify.drift.candidate import Candidate, CandidateServer
from vllm_qualify.engine.image import EngineImage
from vllm_qualify.engine.launchers.base import Script
from vllm_qualify.engine.launchers.registry import launcher_of
from vllm_qualify.engine.server import ServerPlan
from vllm_qualify.errors import HostError, writing
from vllm_qualify.recipe.tables import EngineJudgement, EngineTable, ProbeAnswer, parse_answer

PROBE = Path(probe.__file__)
CHECK, CPU = "check", "cpu"
ASKING = "asking vLLM what it takes"
# Enough for three imports of vLLM side by side on a busy host.
PROBE_LIMIT_S = 600
# Linux allows 128 KiB in an argument.
LONGEST_QUESTION = 100_000
# Of variables that vLLM never reads: a host's home, its name, its store.
OUR_OWN = "VLLM_QUALIFY_"
# A commit of the hub, not a branch or a tag.
PINNED = re.compile("[0-9a-f]{40}")


class Subject(NamedTuple):
    """A cell to check, with its server and the question about it. `asked` is None if its GPU type is unknown."""

    cell: str
    server: ServerPlan
    asked: CandidateServer | None


def table_from(candidate: Candidate, cache: Path) -> EngineTable:
    return candidate.table or ask_candidate(candidate, [], cache, resolve=True)[0].table


def ask_candidate(
    candidate: Candidate,
    subjects: Sequence[Subject],
    cache: Path,
    resolve: bool = False,
    check: Callable[[], None] = lambda: None,
) -> tuple[ProbeAnswer, dict[str, EngineJudgement]]:
    """What the candidate's own code knows, and what it says about each cell's server. `check` is called until then.

    Raises HostError if its Python does not run or gave no answer, and whatever `check` raises.
    """
    groups = questions_of(candidate, subjects)
    answers = [_ask_once(candidate, group, cache, resolve, check) for group in groups]
    judgements = {
        subject.cell: judgement
        for group, answer in zip(groups, answers, strict=False)
        for subject, judgement in zip(group, answer.servers, strict=True)
    }
    return answers[0], judgements


def questions_of(candidate: Candidate, subjects: Sequence[Subject]) -> list[list[Subject]]:
    """The cells of each question. If there are none, there is one question about what the engine knows."""
    known = [subject for subject in subjects if subject.asked is not None]
    return [portion for group in _group_by_models(candidate, known) for portion in _split_group(group)] or [[]]


def _group_by_models(candidate: Candidate, subjects: Sequence[Subject]) -> list[list[Subject]]:
    """Group by local models: a container has one place for local weights, and one for a draft model."""
    is_image = isinstance(candidate.engine, EngineImage)
    held = [_local_models(subject.server) if is_image else [] for subject in subjects]
    # A container with a draft model can also answer about its model without the draft model.
    places = sorted(held, key=len, reverse=True)
    groups: dict[int, list[Subject]] = {}
    for subject, models in zip(subjects, held, strict=True):
        at = next(number for number, place in enumerate(places) if place[: len(models)] == models)
        groups.setdefault(at, []).append(subject)
    return list(groups.values())


def _split_group(group: Sequence[Subject]) -> Iterator[list[Subject]]:
    """Parts of a group, each of which fits into one argument of a command."""
    portion, length = list[Subject](), 0
    for subject in group:
        added = len(_question_text([subject]))
        if portion and length + added > LONGEST_QUESTION:
            yield portion
            portion, length = [], 0
        portion.append(subject)
        length += added
    yield portion


def _question_text(group: Sequence[Subject], *, resolve: bool = False) -> str:
    return json.dumps({"servers": [one.asked.model_dump() for one in group if one.asked], "resolve": resolve})


def _local_models(server: ServerPlan) -> list[Path]:
    """The folders of a server's weights and of its draft model's, if they are on this machine."""
    return [*([Path(server.model)] if server.is_local else []), *([server.draft] if server.draft else [])]


def _ask_once(
    candidate: Candidate, group: Sequence[Subject], cache: Path, resolve: bool, check: Callable[[], None]
) -> ProbeAnswer:
    """Ask one question. A complete answer is kept in `cache`, if nothing that it depends on can change unnoticed."""
    kept = answer_file(candidate, group, cache, resolve=resolve)
    if known := kept_answer(kept):
        return known
    assert candidate.engine is not None  # noqa: S101  (a table alone is not asked)
    question, servers = _question_text(group, resolve=resolve), [subject.server for subject in group]
    asked = Script(PROBE, question, servers, ASKING, CHECK, PROBE_LIMIT_S)
    text = launcher_of(candidate.engine).ask(candidate.engine, asked, check)
    answer = parse_answer(text)
    is_whole = not any(judgement.unclear for judgement in answer.servers) and all(answer.resolved.values())
    if is_whole and all(one.server.is_local or PINNED.fullmatch(str(one.server.revision)) for one in group):
        keep_answer(kept, text)
    return answer


def keep_answer(kept: Path, text: str) -> None:
    """Write an answer whole or not at all, whoever else writes the same one. Raises HostError."""
    with writing(CHECK):
        kept.parent.mkdir(parents=True, exist_ok=True)
        fresh = kept.with_suffix(f".{os.getpid()}")
        fresh.write_text(text)
        fresh.replace(kept)


def answer_file(candidate: Candidate, group: Sequence[Subject], cache: Path, *, resolve: bool = False) -> Path:
    own = {name: value for name, value in os.environ.items() if name.startswith("VLLM_") and not name.startswith(OUR_OWN)}
    # By content: the paths that the engine sees are in the question, and in a container they are always the same.
    held = [_local_models(one.server) for one in group]
    digests = {model: configuration_digest(model) for models in held for model in models}
    models = [[digests[model] for model in models] for models in held]
    question, held_here = _question_text(group, resolve=resolve), json.dumps([own, models], sort_keys=True)
    key = "\0".join([candidate.key, PROBE.read_text(), question, held_here])
    return cache / f"{hashlib.sha256(key.encode()).hexdigest()}.json"


def configuration_digest(model: Path) -> str:
    """The digest of all files that vLLM makes its configuration from; weights are not read."""
    files = sorted(path for path in model.glob("*") if path.suffix in (".json", ".py", ".jinja", ".model"))
    return hashlib.sha256(b"".join(hashlib.sha256(path.read_bytes()).digest() for path in files)).hexdigest()


def kept_answer(path: Path) -> ProbeAnswer | None:
    """The kept answer; None if there is none, or another version wrote it in another form."""
    try:
        return parse_answer(path.read_text())
    except (OSError, HostError):
        return None
