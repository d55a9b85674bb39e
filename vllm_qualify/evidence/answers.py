"""Answers: lm-eval's record of each question, read from its own files, typed and checked."""

import hashlib
import json
import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterator
from io import StringIO
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from vllm_qualify.evidence.lm_eval_internals import says_tools
from vllm_qualify.evidence.lm_eval_worker import GENERATES, TASK, TaskReply
from vllm_qualify.evidence.members import Part, config_hash, group_hash, parts_of
from vllm_qualify.evidence.memory import Memory, digest_together
from vllm_qualify.evidence.texts import ends_in_loop, is_in_other_script
from vllm_qualify.evidence.thinking import REPLIES, read_replies
from vllm_qualify.evidence.tools import questions
from vllm_qualify.plan.cell import TaskPlan
from vllm_qualify.recipe.metrics import METRICS
from vllm_qualify.recipe.values import Count, CountOrNone, Frozen, Share
from vllm_qualify.recipe.workload import USUAL_TOKENS, Accuracy

BLOCKS, LEAST_BLOCK = 5, 2
# The share of a task's questions that may be copies of others.
COPIES_ALLOWED = 0.05
# The most questions that a task may have: the order of so many takes seconds, and far more would take all memory.
MOST_QUESTIONS = 1_000_000
# A run has some 50 blocks, and its baseline one file.
STEPS = Memory(files=128)
# The end of the address that chats go to, and lm-eval's names of the longest reply, as a task may say it.
CHATS, LONGEST = "/chat/completions", ("max_tokens", "max_gen_toks")
# The fields of a document that say what a question is about: MMLU has `subject`, MMLU-Pro `category`.
TOPICS = ("subject", "category", "topic")
# What lm-eval's filters give for a reply in which they find no answer, and how a target ends that may mean the same: scores can
# ignore brackets, case and what comes before.
NOTHING, MEANS_NOTHING = "[invalid]", re.compile(r"invalid\W*\Z", re.IGNORECASE)
# lm-eval's own score of a text: equal to the target or not.
EXACT = "exact_match"


class QuestionBlock(NamedTuple):
    """A block of questions that are asked together. Repetitions, the blocks in them and the server's starts count from 1."""

    repetition: int
    block: int
    questions: list[int]
    start: int = 1

    @property
    def folder(self) -> str:
        return f"r{self.repetition}-b{self.block}"

    @property
    def seeded_by(self) -> str:
        """What the seeds of sampled answers differ by: with the same seed a server gives the same answer again."""
        return f"{self.start} {self.repetition}"


class Answer(Frozen):
    """One answer to a question. `scores` are by `<metric>,<filter>`. The hashes are lm-eval's own.

    `length` is that of the reply in characters. `ends_in_loop` and `in_other_script` are faults of its text: see `texts`.
    The three are None if likelihoods were compared; of older runs the faults are, too. `output_tok` are the reply's tokens
    with its thinking, by its own `usage`, and `has_thinking` is whether it has any; both are None if that was not kept, as
    in older runs. An answer is `unanswered` if its reply was empty, whatever the task made of that. `nothing_by` are the
    filters that found no answer in the reply; files of older runs name none. `traced_to` is relative to the task's folder.
    `start` is the server's start that it comes from, `topic` what the task's own document says that the question is about;
    if it does not say so, the member of a group that it is of.
    """

    question: CountOrNone
    repetition: int
    start: Count = 1
    topic: str | None = None
    doc_hash: str
    prompt_hash: str
    target_hash: str
    scores: dict[str, Share]
    length: CountOrNone | None
    output_tok: CountOrNone | None = None
    has_thinking: bool | None = None
    ends_in_loop: bool | None = None
    in_other_script: bool | None = None
    unanswered: bool
    nothing_by: list[str] = []
    traced_to: str

    @property
    def step(self) -> str:
        """The folder of the step that asked it."""
        return self.traced_to.partition("/")[0]

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


def steps(settings: Accuracy, available: int, repetitions: int, *, sequential: bool) -> list[QuestionBlock]:
    """All steps of a task with `available` questions. They are the same in every run with the same settings.

    Each repetition asks the same questions in another order, and with `sequential` in blocks.
    """
    asked = _shuffled(list(range(available)), settings.seed, "asked")[: settings.num_questions]
    planned_steps = []
    for repetition in range(1, repetitions + 1):
        order = _shuffled(asked, settings.seed, repetition)
        blocks = _split(order, max(1, min(BLOCKS, len(order) // LEAST_BLOCK)) if sequential else 1)
        planned_steps += [QuestionBlock(repetition, number, block) for number, block in enumerate(blocks, start=1)]
    return planned_steps


def _shuffled(questions: list[int], seed: int, what: object) -> list[int]:
    """The questions in the order of a hash, which is the same with every version of Python and of libraries."""
    return sorted(questions, key=lambda question: hashlib.sha256(f"{seed} {what} {question}".encode()).digest())


def _split(order: list[int], parts: int) -> list[list[int]]:
    bounds = [len(order) * part // parts for part in range(parts + 1)]
    blocks = [order[start:end] for start, end in pairwise(bounds)]
    return [block for block in blocks if block]


def planned(folder: Path, task: TaskPlan, start: int = 1) -> list[QuestionBlock]:
    """The steps of a task that was begun, from the files in its folder. `start` is the server's. Raises one of UNUSABLE."""
    reply = TaskReply.model_validate_json((folder / TASK).read_bytes())
    least = task.settings.num_questions
    if not least <= reply.available <= MOST_QUESTIONS:
        raise ValueError(f"the task has {reply.available} questions, where {least} to {MOST_QUESTIONS} were expected")
    without_starts = steps(task.settings, reply.available, task.repetitions, sequential=task.sequential)
    return [step._replace(start=start) for step in without_starts]


def finished(folder: Path, task: TaskPlan, start: int = 1) -> list[QuestionBlock]:
    """The planned steps that have a folder. Raises one of UNUSABLE if they are not the first ones."""
    all_steps = planned(folder, task, start)
    folders = {path.name for path in folder.glob("r*-b*")}
    done = all_steps[: len(folders)]
    if not folders or folders != {step.folder for step in done}:
        raise ValueError(
            f"{', '.join(sorted(folders)) or 'no blocks'} where the first blocks from {all_steps[0].folder} on were expected"
        )
    return done


def read_answers(folder: Path, task: TaskPlan, start: int = 1) -> Answered:
    """The answers of a task from lm-eval's files of its finished steps, all of one start of the server.

    Raises one of UNUSABLE unless each filter scored every question of each step once, a question has the same prompt in all
    repetitions, questions are no copies of others, each hash is that of its content, lm-eval's own scores are those of its
    samples, and no answer is right that its filter did not find; of a group, for each member.
    """
    reply = TaskReply.model_validate_json((folder / TASK).read_bytes())
    parts = [_read_step(folder, step, task, reply) for step in finished(folder, task, start)]
    heads = {head for head, _ in parts}
    if len(heads) != 1:
        raise ValueError("the blocks were not measured with one version of the task")
    answers = [answer for _, part in parts for answer in part]
    _check_alike(answers)
    _check_distinct(answers)
    return Answered(**parts[0][0].model_dump(), answers=answers)


def only(folder: Path, pattern: str) -> Path:
    paths = sorted(folder.glob(pattern))
    if len(paths) != 1:
        raise ValueError(f"{len(paths)} files {pattern} in {folder.name} where one was expected")
    return paths[0]


class _Asked(NamedTuple):
    """What a step asked of one of lm-eval's tasks: the questions by their place in its data, which has `available` of them."""

    task: str
    questions: list[int]
    available: int
    # The part's questions begin there in the group's list. None is no group.
    part: Part | None = None

    @property
    def offset(self) -> int:
        return self.part.offset if self.part else 0

    @property
    def topic(self) -> str | None:
        return self.task if self.part else None


def _asked(step: QuestionBlock, task: TaskPlan, reply: TaskReply) -> list[_Asked]:
    if not reply.members:
        return [_Asked(task.name, step.questions, reply.available)]
    parts = parts_of(reply.members, step.questions)
    return [_Asked(part.member.name, part.questions, part.member.questions, part) for part in parts]


def _read_step(folder: Path, step: QuestionBlock, task: TaskPlan, reply: TaskReply) -> tuple[Head, list[Answer]]:
    asked = _asked(step, task, reply)
    results = only(folder / step.folder, "results_*.json")
    paths = _samples(results, asked)
    bodies = [path.read_bytes() for path in (results, *paths)]
    kept = [path.read_bytes() for path in [folder / step.folder / REPLIES] if path.exists()]
    names = tuple(path.name for path in paths)
    what = (
        step.repetition,
        step.block,
        step.start,
        tuple(step.questions),
        task.name,
        json.dumps(task.gen_kwargs, sort_keys=True),
        reply,
        names,
    )

    def parsed() -> tuple[Head, list[Answer]]:
        head, answers = _parse_step(bodies, paths, step, task, reply)
        return head, _with_replies(answers, folder / step.folder)

    return STEPS.find(digest_together(*bodies, *kept), what, parsed)


def _with_replies(answers: list[Answer], step: Path) -> list[Answer]:
    """The answers with what the kept replies to the same prompt say. Without just one for each, it is not known.

    Questions that are copies have one prompt. Which of its replies is whose does not matter to any sum.
    """
    said: defaultdict[str, list[dict[str, Any]]] = defaultdict(list)
    for reply in read_replies(step):
        said[reply.prompt_hash].append({"output_tok": reply.output_tok, "has_thinking": reply.has_thinking})
    asked = Counter(answer.prompt_hash for answer in answers)
    known = {prompt: iter(said[prompt]) for prompt, times in asked.items() if len(said[prompt]) == times}
    return [
        answer.model_copy(update=next(known[answer.prompt_hash])) if answer.prompt_hash in known else answer
        for answer in answers
    ]


def _samples(results: Path, asked: list[_Asked]) -> list[Path]:
    """The files of samples next to a step's results, one for each task that was asked."""
    if not asked[0].part:
        return [only(results.parent, "samples_*.jsonl")]
    stamp = results.stem.removeprefix("results_")
    wanted = [results.with_name(f"samples_{each.task}_{stamp}.jsonl") for each in asked]
    if odd := sorted({path.name for path in results.parent.glob("samples_*.jsonl")} ^ {path.name for path in wanted}):
        raise ValueError(f"the files of samples in {results.parent.name} are not of the members that it asked: {odd[0]}")
    return wanted


def _parse_step(
    bodies: list[bytes], paths: list[Path], step: QuestionBlock, task: TaskPlan, reply: TaskReply
) -> tuple[Head, list[Answer]]:
    """A step's answers, from the content of its results and of its files of samples."""
    results, asked = json.loads(bodies[0]), _asked(step, task, reply)
    if reply.members and results["results"].keys() != {each.task for each in asked}:
        raise ValueError(f"the results of {step.folder} are not of the members that it asked")
    _check_run(results, task, step)
    for each in asked:
        if results["configs"][each.task]["output_type"] == GENERATES:
            _check_asked_so(results["configs"][each.task].get("generation_kwargs") or {}, task, step)
    parsed = [
        _parse_part(results, body, path, task, step, each) for body, path, each in zip(bodies[1:], paths, asked, strict=True)
    ]
    if len({frozenset(answer.scores) for _, answers in parsed for answer in answers}) != 1:
        raise ValueError(f"the members in {step.folder} were not scored alike")
    heads = [head for head, _ in parsed]
    return _group_head(task.name, reply, heads[0]) if reply.members else heads[0], [
        answer for _, part in parsed for answer in part
    ]


def _parse_part(
    results: dict[str, Any], samples: bytes, path: Path, task: TaskPlan, step: QuestionBlock, asked: _Asked
) -> tuple[Head, list[Answer]]:
    rows = [(number, json.loads(line)) for number, line in _lines(samples)]
    result = results["results"][asked.task]
    keys = _scored(result)
    filters = list(dict.fromkeys(name for _, name in keys))
    where = f"{step.folder} of {asked.task}" if asked.part else step.folder
    by_filter = {name: [(number, row) for number, row in rows if row["filter"] == name] for name in filters}
    for name in filters:
        _check_complete([row for _, row in by_filter[name]], asked, results["n-samples"][asked.task], where, name)
    for _, row in rows:
        _check_hashes(row)
        _check_request(row, task, step)
    if says_tools(results["configs"][asked.task].get("metadata")):
        for _, row in rows:
            _check_tools(row)
    for metric, name in keys:
        _check_score(metric, name, [row for _, row in by_filter[name]], result, where)
    if EXACT in {metric for metric, _ in keys} and _is_scored_by_target(results["configs"][asked.task]):
        for _, row in rows:
            _check_right(row)
    head = _head(results, asked)
    lines = {name: {row["doc_id"]: row for _, row in by_filter[name]} for name in filters}
    answers = [
        _answer(step, number, path, [(metric, name, lines[name][row["doc_id"]]) for metric, name in keys], head, asked)
        for number, row in by_filter[filters[0]]
    ]
    return head, answers


def _check_request(row: dict[str, Any], task: TaskPlan, step: QuestionBlock) -> None:
    """Check the arguments of a question's own requests, as lm-eval's samples have them. Likelihoods have none."""
    for request in row["arguments"].values():
        if isinstance(asked := request.get("arg_1"), dict):
            _check_asked_so(asked, task, step)


def _check_run(results: dict[str, Any], task: TaskPlan, step: QuestionBlock) -> None:
    """Check lm-eval's record of the whole run: where requests went, how long a reply may be, the system's turn, and all that
    went over the task's own way of asking.
    """
    arguments, settings = results["config"]["model_args"], task.settings
    asked = {
        "api": "chat" if str(arguments["base_url"]).endswith(CHATS) else "completions",
        "max_gen_toks": arguments["max_gen_toks"],
        "system_prompt": results["system_instruction"],
    }
    planned = {
        "api": settings.api,
        "max_gen_toks": settings.max_gen_toks or USUAL_TOKENS,
        "system_prompt": settings.system_prompt,
    }
    sent = {name: value for name, value in (results["config"]["gen_kwargs"] or {}).items() if name not in LONGEST}
    _check_same(asked | sent, dict.fromkeys(sent) | planned | task.gen_kwargs, step)


def _check_asked_so(asked: dict[str, Any], task: TaskPlan, step: QuestionBlock) -> None:
    """Check that requests were made as the plan says: how tokens are chosen, what the chat's template gets, what ends a reply.

    A longest reply of the task's own goes over that of the run, unless the plan has one. In older plans 256 meant none.
    """
    longest = task.settings.max_gen_toks
    own = () if longest in (None, USUAL_TOKENS) else (name for name in LONGEST if name in asked)
    _check_same(asked, task.gen_kwargs | dict.fromkeys(own, longest), step)


def _check_same(asked: dict[str, Any], planned: dict[str, Any], step: QuestionBlock) -> None:
    if other := sorted(name for name in planned if asked.get(name) != planned[name]):
        raise ValueError(f"{other[0]} was {asked.get(other[0])} in {step.folder}, and {planned[other[0]]} is planned")


def _lines(content: bytes) -> Iterator[tuple[int, str]]:
    """The lines, numbered from 1. `splitlines` would also split at U+2028, U+0085 and the like, which replies may contain."""
    return enumerate(StringIO(content.decode("utf-8"), newline="\n"), start=1)


def _scored(result: dict[str, Any]) -> list[tuple[str, str]]:
    """(metric, filter) of lm-eval's keys such as `exact_match,strict-match`, if the metric is a declared score."""
    pairs = [(metric, name) for metric, comma, name in (key.partition(",") for key in result) if comma]
    scored = [(metric, name) for metric, name in pairs if metric in METRICS and METRICS[metric].is_score]
    if not scored:
        raise ValueError(f"no known metric among {list(result)}")
    return scored


def _check_complete(rows: list[dict[str, Any]], asked: _Asked, counts: dict[str, Any], where: str, name: str) -> None:
    wanted = len(asked.questions)
    if counts != {"original": asked.available, "effective": wanted}:
        raise ValueError(f"lm-eval counts {counts} in {where}, where {wanted} of {asked.available} questions were asked")
    if Counter(row["doc_id"] for row in rows) != Counter(asked.questions):
        raise ValueError(f"{len(rows)} samples of {name} in {where} are not of its {wanted} questions, each once")


def _check_hashes(row: dict[str, Any]) -> None:
    """Check that the hashes, by which questions are compared, are those that lm-eval makes of the question beside them."""
    document = json.dumps(row["doc"], indent=2, ensure_ascii=False)
    prompt = row["arguments"]["gen_args_0"]["arg_0"]
    # lm-eval keeps a chat's messages as text in a tuple.
    content = {
        "doc_hash": document,
        "prompt_hash": prompt if isinstance(prompt, str) else prompt[0],
        "target_hash": row["target"],
    }
    for name, text in content.items():
        if hashlib.sha256(str(text).encode()).hexdigest() != row[name]:
            raise ValueError(f"the {name} of question {row['doc_id']} is not that of its content")


def _check_tools(row: dict[str, Any]) -> None:
    """Check that a prompt has the messages and the tools of the question beside it."""
    prompt = row["arguments"]["gen_args_0"]["arg_0"]
    sent = json.loads(prompt[0])[-1]["content"]
    if sent != questions.asked(row["doc"]):
        raise ValueError(f"question {row['doc_id']} was not asked with its own messages and tools")


def _score(value: object) -> float:
    """A score as a number. Text that looks like one is not what lm-eval writes."""
    if not isinstance(value, int | float):
        raise TypeError(f"the score {value!r} is no number")
    return float(value)


def _check_score(metric: str, name: str, rows: list[dict[str, Any]], result: dict[str, Any], where: str) -> None:
    scores = [_score(row[metric]) for row in rows]
    # Each comparison is false for NaN.
    if not all(0 <= score <= 1 for score in scores):
        raise ValueError(f"a sample's {metric} of {name} in {where} is not between 0 and 1")
    reported, mean = _score(result[f"{metric},{name}"]), math.fsum(scores) / len(scores)
    if not abs(reported - mean) <= 1e-6:
        raise ValueError(f"lm-eval's {metric} of {name} in {where}, {reported}, is not its samples' {mean}")


def _is_scored_by_target(config: dict[str, Any]) -> bool:
    """Whether lm-eval itself compares the filtered answer with the target: a task's own function may score otherwise."""
    return config["output_type"] == GENERATES and not config.get("process_results")


def _check_right(row: dict[str, Any]) -> None:
    """Check that no answer is right that its filter did not find."""
    if _finds_nothing(row) and _score(row[EXACT]) > 0:
        raise ValueError(f"question {row['doc_id']} is right, and {row['filter']} found no answer in its reply")


def _finds_nothing(row: dict[str, Any]) -> bool:
    """Whether a filter found no answer. Where the target is the word for that, it is not known."""
    found = list(_leaves(row["filtered_resps"]))
    meant = any(MEANS_NOTHING.search(str(target)) for target in _leaves(row["target"]))
    return bool(found) and not meant and all(each == NOTHING for each in found)


def _leaves(found: object) -> Iterator[object]:
    """What a filter gave, also if it keeps several replies of a question; or the targets of a question that has several."""
    if isinstance(found, list):
        for each in found:
            yield from _leaves(each)
    else:
        yield found


def _head(results: dict[str, Any], asked: _Asked) -> Head:
    config = results["configs"][asked.task]
    head = Head(
        task=asked.task,
        task_version=str(results["versions"][asked.task]),
        config_hash=config_hash(config),
        output_type=config["output_type"],
        lm_eval=results["lm_eval_version"],
    )
    if asked.part:
        member = asked.part.member
        if (head.task_version, head.config_hash, head.output_type) != (
            member.task_version,
            member.config_hash,
            member.output_type,
        ):
            raise ValueError(f"{asked.task} was not measured with the version that was loaded")
    return head


def _group_head(task: str, reply: TaskReply, member: Head) -> Head:
    """The identity of a group, with what all its members have in common."""
    versions = ", ".join(sorted({each.task_version for each in reply.members}))
    return member.model_copy(update={"task": task, "task_version": versions, "config_hash": group_hash(reply.members)})


def _answer(
    step: QuestionBlock,
    number: int,
    path: Path,
    scored: list[tuple[str, str, dict[str, Any]]],
    head: Head,
    asked: _Asked,
) -> Answer:
    _, _, row = scored[0]
    replies = _replies(row) if head.output_type == GENERATES else None
    return Answer(
        question=row["doc_id"] + asked.offset,
        repetition=step.repetition,
        start=step.start,
        topic=_topic(row["doc"]) or asked.topic,
        doc_hash=row["doc_hash"],
        prompt_hash=row["prompt_hash"],
        target_hash=row["target_hash"],
        scores={f"{metric},{name}": _score(row[metric]) for metric, name, row in scored},
        length=None if replies is None else sum(map(len, replies)),
        ends_in_loop=None if replies is None else any(map(ends_in_loop, replies)),
        in_other_script=None if replies is None else is_in_other_script("".join(replies), _asked_text(row)),
        unanswered=replies is not None and not all(reply.strip() for reply in replies),
        nothing_by=list(dict.fromkeys(row["filter"] for _, _, row in scored if _finds_nothing(row))),
        traced_to=f"{step.folder}/{path.name}:{number}",
    )


def _asked_text(row: dict[str, Any]) -> str:
    """All that a question has of text: its prompt, its document and the expected answer."""
    return json.dumps([row["arguments"]["gen_args_0"]["arg_0"], row["doc"], row["target"]], ensure_ascii=False, default=str)


def _topic(document: object) -> str | None:
    """What a question is about, by the first field of its document that says so."""
    fields = document if isinstance(document, dict) else {}
    return next((fields[name] for name in TOPICS if isinstance(fields.get(name), str)), None)


def _replies(row: dict[str, Any]) -> list[str]:
    """The model's replies to one question, of which a task may want several."""
    replies = ["" if reply is None else str(reply) for replies in row["resps"] for reply in replies]
    if not replies:
        raise ValueError(f"question {row['doc_id']} has no reply, not even an empty one")
    return replies


def _check_alike(answers: list[Answer]) -> None:
    """Check that a question is the same each time it is asked."""
    hashes: dict[int, tuple[str, str, str]] = {}
    for answer in answers:
        asked = (answer.doc_hash, answer.prompt_hash, answer.target_hash)
        if hashes.setdefault(answer.question, asked) != asked:
            raise ValueError(f"question {answer.question} was asked with another prompt in repetition {answer.repetition}")


def _check_distinct(answers: list[Answer]) -> None:
    """Check that the questions differ. A few data sets have a question twice."""
    documents = Counter({answer.question: answer.doc_hash for answer in answers}.values())
    copies = documents.total() - len(documents)
    if copies > COPIES_ALLOWED * documents.total():
        raise ValueError(f"{copies} of {documents.total()} questions are copies of others")


def write(answered: Answered, path: Path) -> None:
    """Write JSON lines: first the task, and then each answer."""
    line = _Line(**(answered.model_dump() | {"answers": len(answered.answers)}))
    path.write_text("".join(f"{each.model_dump_json()}\n" for each in (line, *answered.answers)), encoding="utf-8")


def load(path: Path) -> Answered:
    """Read what `write` wrote. Raises one of UNUSABLE if the file is anything else, or cut."""
    content = path.read_bytes()
    return STEPS.find(digest_together(content), "answers", lambda: _parse_answers(content, path.name))


def _parse_answers(content: bytes, name: str) -> Answered:
    first, *others = [line for _, line in _lines(content)]
    line = _Line.model_validate_json(first, strict=True)
    answers = [Answer.model_validate_json(other, strict=True) for other in others]
    if len(answers) != line.answers:
        raise ValueError(f"{len(answers)} answers of {line.answers} in {name}")
    return Answered(**(line.model_dump() | {"answers": answers}))
