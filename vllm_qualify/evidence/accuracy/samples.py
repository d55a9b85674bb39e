"""lm-eval's samples: its record of each question, read from its own files into answers.

They must be whole, be what the plan asks for, and agree with each other.
"""

import hashlib
import json
import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from vllm_qualify.evidence.accuracy.answers import STEPS, Answer, Answered, Head, number_lines
from vllm_qualify.evidence.accuracy.blocks import Part, QuestionBlock, read_finished, split_by_member
from vllm_qualify.evidence.accuracy.form import reads_right
from vllm_qualify.evidence.accuracy.letters import GENERATES, TASK, TaskReply, config_hash
from vllm_qualify.evidence.accuracy.lm_eval_internals import says_tools
from vllm_qualify.evidence.accuracy.texts import ends_in_loop, is_in_other_script
from vllm_qualify.evidence.accuracy.thinking import REPLIES, read_replies
from vllm_qualify.evidence.accuracy.tools import questions
from vllm_qualify.evidence.memory import digest_together
from vllm_qualify.plan.cell import TaskPlan
from vllm_qualify.recipe.accuracy import USUAL_TOKENS
from vllm_qualify.recipe.metrics import METRICS

Row = dict[str, Any]

# The fields of a document that say what a question is about: MMLU has `subject`, MMLU-Pro `category`.
TOPICS = ("subject", "category", "topic")
# The share of a task's questions that may be copies of others.
COPIES_ALLOWED = 0.05
# The end of the address that chats go to, and lm-eval's names of the longest reply, as a task may say it.
CHATS, LONGEST = "/chat/completions", ("max_tokens", "max_gen_toks")
# What lm-eval's filters give for a reply in which they find no answer, and how a target ends that may mean the same: scores can
# ignore brackets, case and what comes before.
NOTHING, MEANS_NOTHING = "[invalid]", re.compile(r"invalid\W*\Z", re.IGNORECASE)
# lm-eval's own score of a text: equal to the target or not.
EXACT = "exact_match"


def read_answers(folder: Path, task: TaskPlan, start: int = 1) -> Answered:
    """The answers of a task from lm-eval's files of its finished steps, all of one start of the server.

    Raises one of UNUSABLE unless each filter scored every question of each step once, a question has the same prompt in all
    repetitions, questions are no copies of others, each hash is that of its content, lm-eval's own scores are those of its
    samples, and no answer is right that its filter did not find; of a group, for each member.
    """
    reply = TaskReply.model_validate_json((folder / TASK).read_bytes())
    parts = [_read_step(folder, step, task, reply) for step in read_finished(folder, task, start)]
    if len({head for head, _ in parts}) != 1:
        raise ValueError("the blocks were not measured with one version of the task")
    answers = [answer for _, part in parts for answer in part]
    asked_with: dict[int, tuple[str, str, str]] = {}
    for answer in answers:
        hashes = (answer.doc_hash, answer.prompt_hash, answer.target_hash)
        if asked_with.setdefault(answer.question, hashes) != hashes:
            raise ValueError(f"question {answer.question} was asked with another prompt in repetition {answer.repetition}")
    # A few data sets have a question twice.
    copies = len(asked_with) - len({document for document, _, _ in asked_with.values()})
    if copies > COPIES_ALLOWED * len(asked_with):
        raise ValueError(f"{copies} of {len(asked_with)} questions are copies of others")
    return Answered(**parts[0][0].model_dump(), answers=answers)


def find_only_file(folder: Path, pattern: str) -> Path:
    paths = sorted(folder.glob(pattern))
    if len(paths) != 1:
        raise ValueError(f"{len(paths)} files {pattern} in {folder.name} where one was expected")
    return paths[0]


def _read_step(folder: Path, step: QuestionBlock, task: TaskPlan, reply: TaskReply) -> tuple[Head, list[Answer]]:
    results = find_only_file(folder / step.folder, "results_*.json")
    paths = find_samples(results, split_by_member(step, task, reply))
    bodies = [path.read_bytes() for path in (results, *paths)]
    kept = [path.read_bytes() for path in [folder / step.folder / REPLIES] if path.exists()]
    asked = (step.repetition, step.block, step.start, tuple(step.questions))
    what = (*asked, task.name, json.dumps(task.gen_kwargs, sort_keys=True), reply, tuple(path.name for path in paths))

    def parse_files() -> tuple[Head, list[Answer]]:
        head, answers = _parse_step(bodies, paths, step, task, reply)
        return head, _join_replies(answers, folder / step.folder)

    return STEPS.find(digest_together(*bodies, *kept), what, parse_files)


def _join_replies(answers: list[Answer], step: Path) -> list[Answer]:
    """The answers with the tokens and thinking of their kept replies, unless a prompt has more or fewer replies than answers.

    Questions that are copies have one prompt. Which of its replies is whose does not matter to any sum.
    """
    said: defaultdict[str, list[Row]] = defaultdict(list)
    for reply in read_replies(step):
        said[reply.prompt_hash].append({"output_tok": reply.output_tok, "has_thinking": reply.has_thinking})
    asked = Counter(answer.prompt_hash for answer in answers)
    known = {prompt: iter(said[prompt]) for prompt, times in asked.items() if len(said[prompt]) == times}
    return [
        answer.model_copy(update=next(known[answer.prompt_hash])) if answer.prompt_hash in known else answer
        for answer in answers
    ]


def find_samples(results: Path, asked: list[Part]) -> list[Path]:
    """The files of samples next to a step's results, one for each task that was asked."""
    if not asked[0].member:
        return [find_only_file(results.parent, "samples_*.jsonl")]
    stamp = results.stem.removeprefix("results_")
    wanted = [results.with_name(f"samples_{part.task}_{stamp}.jsonl") for part in asked]
    if odd := sorted({path.name for path in results.parent.glob("samples_*.jsonl")} ^ {path.name for path in wanted}):
        raise ValueError(f"the files of samples in {results.parent.name} are not of the members that it asked: {odd[0]}")
    return wanted


def _parse_step(
    bodies: list[bytes], paths: list[Path], step: QuestionBlock, task: TaskPlan, reply: TaskReply
) -> tuple[Head, list[Answer]]:
    """A step's answers, from the content of its results and of its files of samples."""
    results, asked = json.loads(bodies[0]), split_by_member(step, task, reply)
    if reply.members and results["results"].keys() != {part.task for part in asked}:
        raise ValueError(f"the results of {step.folder} are not of the members that it asked")
    _check_run(results, task, step)
    for part in asked:
        if results["configs"][part.task]["output_type"] == GENERATES:
            _check_options(results["configs"][part.task].get("generation_kwargs") or {}, task, step)
    files = zip(bodies[1:], paths, asked, strict=True)
    parsed = [_parse_part(results, body, path, task, step, part) for body, path, part in files]
    head, answers = parsed[0][0], [answer for _, of_part in parsed for answer in of_part]
    if len({frozenset(answer.scores) for answer in answers}) != 1:
        raise ValueError(f"the members in {step.folder} were not scored alike")
    if reply.members:
        # The identity of a group is of how all members ask and score, whichever of them were asked.
        members = json.dumps([[member.name, member.task_version, member.config_hash] for member in reply.members])
        versions = ", ".join(sorted({member.task_version for member in reply.members}))
        head = head.model_copy(update={"task": task.name, "task_version": versions, "config_hash": _sha256(members)})
    return head, answers


def _parse_part(
    results: Row, samples: bytes, path: Path, task: TaskPlan, step: QuestionBlock, asked: Part
) -> tuple[Head, list[Answer]]:
    rows = [(number, json.loads(line)) for number, line in number_lines(samples)]
    result, config = results["results"][asked.task], results["configs"][asked.task]
    keys = _list_scores(result)
    where = f"{step.folder} of {asked.task}" if asked.member else step.folder
    by_filter = {name: [(number, row) for number, row in rows if row["filter"] == name] for _, name in keys}
    for name, named_rows in by_filter.items():
        _check_complete([row["doc_id"] for _, row in named_rows], asked, results["n-samples"][asked.task], where, name)
    for _, row in rows:
        _check_question(row, task, step, with_tools=says_tools(config.get("metadata")))
    for metric, name in keys:
        _check_score(metric, name, [row for _, row in by_filter[name]], result, where)
    # A task's own function may score otherwise than by comparing the filtered answer with the target.
    by_target = config["output_type"] == GENERATES and not config.get("process_results")
    for _, row in rows if by_target and EXACT in {metric for metric, _ in keys} else []:
        if _finds_nothing(row) and _read_score(row[EXACT]) > 0:
            raise ValueError(f"question {row['doc_id']} is right, and {row['filter']} found no answer in its reply")
    head = _read_head(results, asked)
    lines = {name: {row["doc_id"]: row for _, row in named_rows} for name, named_rows in by_filter.items()}
    answers = []
    for number, row in by_filter[keys[0][1]]:
        scored = [(metric, name, lines[name][row["doc_id"]]) for metric, name in keys]
        place = f"{step.folder}/{path.name}:{number}"
        answers.append(_read_answer(step, place, scored, head, asked, is_compared=by_target))
    return head, answers


def _list_scores(result: Row) -> list[tuple[str, str]]:
    """(metric, filter) of lm-eval's keys such as `exact_match,strict-match`, if the metric is a declared score."""
    pairs = [(metric, name) for metric, comma, name in (key.partition(",") for key in result) if comma]
    scored = [(metric, name) for metric, name in pairs if metric in METRICS and METRICS[metric].is_score]
    if not scored:
        raise ValueError(f"no known metric among {list(result)}")
    return scored


def _read_head(results: Row, asked: Part) -> Head:
    config, member = results["configs"][asked.task], asked.member
    head = Head(
        task=asked.task,
        task_version=str(results["versions"][asked.task]),
        config_hash=config_hash(config),
        output_type=config["output_type"],
        lm_eval=results["lm_eval_version"],
    )
    loaded = {"task_version", "config_hash", "output_type"}
    if member and head.model_dump(include=loaded) != member.model_dump(include=loaded):
        raise ValueError(f"{asked.task} was not measured with the version that was loaded")
    return head


def _read_answer(
    step: QuestionBlock, traced_to: str, scored: list[tuple[str, str, Row]], head: Head, asked: Part, *, is_compared: bool
) -> Answer:
    """`is_compared` says that a score is of the filtered answer beside the target, and of no function of the task's."""
    _, _, row = scored[0]
    replies = _reply_texts(row) if head.output_type == GENERATES else None
    fields = row["doc"] if isinstance(row["doc"], dict) else {}
    topic = next((fields[name] for name in TOPICS if isinstance(fields.get(name), str)), None)
    return Answer(
        question=row["doc_id"] + asked.offset,
        repetition=step.repetition,
        start=step.start,
        topic=topic or (asked.task if asked.member else None),
        doc_hash=row["doc_hash"],
        prompt_hash=row["prompt_hash"],
        target_hash=row["target_hash"],
        scores={f"{metric},{name}": _read_score(row[metric]) for metric, name, row in scored},
        length=None if replies is None else sum(map(len, replies)),
        ends_in_loop=None if replies is None else any(map(ends_in_loop, replies)),
        in_other_script=None if replies is None else is_in_other_script("".join(replies), _asked_text(row)),
        reads_right=_read_tolerantly(replies, row["target"]) if is_compared else None,
        unanswered=replies is not None and not all(reply.strip() for reply in replies),
        nothing_by=list(dict.fromkeys(row["filter"] for _, _, row in scored if _finds_nothing(row))),
        traced_to=traced_to,
    )


def _read_tolerantly(replies: list[str] | None, target: object) -> bool | None:
    """Whether every reply gives the target. Of a task that scores several replies to a question only the task can tell."""
    return reads_right(replies[0], target) if replies is not None and len(replies) == 1 and isinstance(target, str) else None


def _asked_text(row: Row) -> str:
    """All that a question has of text: its prompt, its document and the expected answer."""
    return json.dumps([row["arguments"]["gen_args_0"]["arg_0"], row["doc"], row["target"]], ensure_ascii=False, default=str)


def _reply_texts(row: Row) -> list[str]:
    """The model's replies to one question, of which a task may want several."""
    replies = ["" if reply is None else str(reply) for replies in row["resps"] for reply in replies]
    if not replies:
        raise ValueError(f"question {row['doc_id']} has no reply, not even an empty one")
    return replies


# --- checks


def _check_run(results: Row, task: TaskPlan, step: QuestionBlock) -> None:
    """Check lm-eval's record of the whole run: where requests went, how long a reply may be, the system's turn, and whatever
    overrides the task's own options.
    """
    arguments, settings = results["config"]["model_args"], task.settings
    asked = {
        "api": "chat" if str(arguments["base_url"]).endswith(CHATS) else "completions",
        "max_gen_toks": arguments["max_gen_toks"],
        "system_prompt": results["system_instruction"],
    }
    longest = settings.max_gen_toks or USUAL_TOKENS
    planned = {"api": settings.api, "max_gen_toks": longest, "system_prompt": settings.system_prompt}
    sent = {name: value for name, value in (results["config"]["gen_kwargs"] or {}).items() if name not in LONGEST}
    _check_planned(asked | sent, dict.fromkeys(sent) | planned | task.gen_kwargs, step)


def _check_options(asked: Row, task: TaskPlan, step: QuestionBlock) -> None:
    """Check that requests were made as the plan says: how tokens are chosen, what the chat's template gets, what ends a reply.

    A longest reply of the task's own overrides that of the run, unless the plan has one.
    """
    longest = task.settings.max_gen_toks
    own = () if longest is None else (name for name in LONGEST if name in asked)
    _check_planned(asked, task.gen_kwargs | dict.fromkeys(own, longest), step)


def _check_planned(asked: Row, planned: Row, step: QuestionBlock) -> None:
    if other := sorted(name for name in planned if asked.get(name) != planned[name]):
        raise ValueError(f"{other[0]} was {asked.get(other[0])} in {step.folder}, and {planned[other[0]]} is planned")


def _check_complete(asked: list[Any], part: Part, counts: Row, where: str, name: str) -> None:
    wanted = len(part.questions)
    if counts != {"original": part.available, "effective": wanted}:
        raise ValueError(f"lm-eval counts {counts} in {where}, where {wanted} of {part.available} questions were asked")
    if Counter(asked) != Counter(part.questions):
        raise ValueError(f"{len(asked)} samples of {name} in {where} are not of its {wanted} questions, each once")


def _check_question(row: Row, task: TaskPlan, step: QuestionBlock, *, with_tools: bool) -> None:
    """Check a question's hashes, by which it is compared, the options of its requests, and its messages and tools."""
    prompt = row["arguments"]["gen_args_0"]["arg_0"]
    # lm-eval keeps a chat's messages as text in a tuple.
    content = {
        "doc_hash": json.dumps(row["doc"], indent=2, ensure_ascii=False),
        "prompt_hash": prompt if isinstance(prompt, str) else prompt[0],
        "target_hash": row["target"],
    }
    for name, text in content.items():
        if _sha256(str(text)) != row[name]:
            raise ValueError(f"the {name} of question {row['doc_id']} is not that of its content")
    for request in row["arguments"].values():
        # Those of likelihoods have no options.
        if isinstance(options := request.get("arg_1"), dict):
            _check_options(options, task, step)
    if with_tools and json.loads(prompt[0])[-1]["content"] != questions.asked(row["doc"]):
        raise ValueError(f"question {row['doc_id']} was not asked with its own messages and tools")


def _check_score(metric: str, name: str, rows: list[Row], result: Row, where: str) -> None:
    scores = [_read_score(row[metric]) for row in rows]
    # Each comparison is false for NaN.
    if not all(0 <= score <= 1 for score in scores):
        raise ValueError(f"a sample's {metric} of {name} in {where} is not between 0 and 1")
    reported, mean = _read_score(result[f"{metric},{name}"]), math.fsum(scores) / len(scores)
    if not abs(reported - mean) <= 1e-6:
        raise ValueError(f"lm-eval's {metric} of {name} in {where}, {reported}, is not its samples' {mean}")


def _read_score(value: object) -> float:
    """A score as a number. Text that looks like one is not what lm-eval writes."""
    if not isinstance(value, int | float):
        raise TypeError(f"the score {value!r} is no number")
    return float(value)


def _finds_nothing(row: Row) -> bool:
    """Whether a filter found no answer. Where the target is the word for that, it is not known."""
    found = list(_flatten_values(row["filtered_resps"]))
    meant = any(MEANS_NOTHING.search(str(target)) for target in _flatten_values(row["target"]))
    return bool(found) and not meant and all(each == NOTHING for each in found)


def _flatten_values(found: object) -> Iterator[object]:
    """What a filter gave, also if it keeps several replies of a question; or the targets of a question that has several."""
    if isinstance(found, list):
        for each in found:
            yield from _flatten_values(each)
    else:
        yield found


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
