"""Answers of a task, typed, with the file that keeps them."""

from collections.abc import Iterator
from io import StringIO
from pathlib import Path

from vllm_qualify.evidence.memory import Memory, digest_together
from vllm_qualify.recipe.values import Count, CountOrZero, Frozen, Share

# A run has some 50 blocks, and its baseline one file.
STEPS = Memory(files=128)


class Answer(Frozen):
    """One answer to a question. The hashes are lm-eval's own."""

    question: CountOrZero
    repetition: int
    start: Count = 1
    """the start of the server that it comes from"""
    topic: str | None = None
    """what the task's own document says that the question is about; or else the member of the group that it is of"""
    doc_hash: str
    prompt_hash: str
    target_hash: str
    scores: dict[str, Share]
    """by `<metric>,<filter>`"""
    length: CountOrZero | None
    """of the reply, in characters; None if likelihoods were compared"""
    output_tok: CountOrZero | None = None
    """the reply's tokens with its thinking, by its own `usage`; None if that was not kept"""
    has_thinking: bool | None = None
    """None if the reply was not kept"""
    ends_in_loop: bool | None = None
    """a fault of the reply's text, see `texts`; None if likelihoods were compared"""
    in_other_script: bool | None = None
    """as `ends_in_loop`"""
    reads_right: bool | None = None
    """whether a tolerant reader finds the target in the reply, see `form`; None if it cannot tell"""
    unanswered: bool
    """whether the reply was empty, whatever the task made of that"""
    nothing_by: list[str] = []
    """the filters that found no answer in the reply"""
    traced_to: str
    """relative to the task's folder"""

    @property
    def step(self) -> str:
        """The folder of the step that asked it."""
        return self.traced_to.partition("/")[0]

    @property
    def is_lost_by_form(self) -> bool | None:
        """Whether no filter reads the reply as right, and a tolerant reader does; None if none of them can tell."""
        return None if self.reads_right is None else self.reads_right and not any(map(self.score, self.scores))

    def score(self, key: str) -> float:
        """Its score by `<metric>,<filter>`; an empty reply is wrong."""
        return 0.0 if self.unanswered else self.scores[key]


class Head(Frozen):
    """The identity of a task. `config_hash` is of its prompts and scoring, and is the same in every run on every machine.

    A group's is of all its members, whichever of them a step asked.
    """

    task: str
    task_version: str
    config_hash: str
    output_type: str
    lm_eval: str


class Answered(Head):
    """A task with its answers, in the order of the steps."""

    answers: list[Answer]

    @property
    def keys(self) -> list[tuple[str, str]]:
        """(metric, filter) of each score."""
        return [(metric, name) for metric, _, name in (key.partition(",") for key in self.answers[0].scores)]


class _Line(Head):
    """The first line of a file of answers. The count shows whether the file was cut."""

    answers: int


def number_lines(content: bytes) -> Iterator[tuple[int, str]]:
    """The lines, numbered from 1. `splitlines` would also split at U+2028, U+0085 and the like, which replies may contain."""
    return enumerate(StringIO(content.decode("utf-8"), newline="\n"), start=1)


def write(answered: Answered, path: Path) -> None:
    """Write JSON lines: first the task, and then each answer."""
    line = _Line(**(answered.model_dump() | {"answers": len(answered.answers)}))
    path.write_text("".join(f"{each.model_dump_json()}\n" for each in (line, *answered.answers)), encoding="utf-8")


def load(path: Path) -> Answered:
    """Read what `write` wrote. Raises one of UNUSABLE if the file is anything else, or cut."""
    content = path.read_bytes()
    return STEPS.find(digest_together(content), "answers", lambda: _parse_answers(content, path.name))


def _parse_answers(content: bytes, name: str) -> Answered:
    first, *others = [line for _, line in number_lines(content)]
    line = _Line.model_validate_json(first, strict=True)
    answers = [Answer.model_validate_json(other, strict=True) for other in others]
    if len(answers) != line.answers:
        raise ValueError(f"{len(answers)} answers of {line.answers} in {name}")
    return Answered(**(line.model_dump() | {"answers": answers}))
