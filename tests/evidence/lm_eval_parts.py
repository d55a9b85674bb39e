"""Tries everything that `lm_eval_internals` changes or reads, with the lm-eval that Python finds; prints what fails, by name.

It runs in a process of its own: `python -m tests.evidence.lm_eval_parts [--without MODULE:CLASS.NAME] [PART …]`. The option
takes an attribute away first, as a new version of lm-eval would. Without names, all parts are tried.
"""

import asyncio
import hashlib
import importlib
import inspect
import json
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from tests.fakes.openai_server import Book, serving
from tests.fakes.redirecting import redirecting
from vllm_qualify.evidence.accuracy import lm_eval_internals as internals
from vllm_qualify.evidence.accuracy.pictures import Pictures
from vllm_qualify.evidence.accuracy.task_files import OURS
from vllm_qualify.evidence.accuracy.tools.questions import request_of
from vllm_qualify.evidence.accuracy.tools.scoring import text_of

SIZE = 4
# One pixel.
GIF = "R0lGODlhAQABAIAAAP8AAAAAACH5BAAAAAAALAAAAAABAAEAAAICRAEAOw=="
TASK = """\
task: {name}
tag: {tag}
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}, train: {data}}}}}
training_split: train
test_split: test
output_type: {kind}
doc_to_text: "Question: {{{{question}}}}\\nAnswer:"
doc_to_target: "{{{{answer}}}}"
metric_list: [{{metric: {metric}}}]
"""
GROUP = {"group": "both", "task": ["one", "two"], "aggregate_metric_list": [{"metric": "exact_match", "weight_by_size": True}]}
# What the worker calls by these names, of lm-eval's documented interface and of what lies below it.
CALLED = {
    "lm_eval:simple_evaluate": {
        *("model", "model_args", "tasks", "task_manager", "samples", "num_fewshot", "gen_kwargs", "system_instruction"),
        *("apply_chat_template", "evaluation_tracker", "bootstrap_iters", "random_seed", "numpy_random_seed"),
        *("torch_random_seed", "fewshot_random_seed"),
    },
    "lm_eval.tasks:TaskManager": {"include_path", "include_defaults"},
    "lm_eval.loggers:EvaluationTracker": {"output_path"},
    "lm_eval.loggers:EvaluationTracker.save_results_aggregated": {"results", "samples"},
    "lm_eval.loggers:EvaluationTracker.save_results_samples": {"task_name", "samples"},
    "lm_eval.utils:check_remote_tokenizer_support": {"base_url"},
}


def _at(name: str) -> Any:
    module, _, path = name.partition(":")
    found = importlib.import_module(module)
    for part in path.split("."):
        found = getattr(found, part)
    return found


ROWS = [{"question": f"What is {number} and 1?", "answer": str(number + 1)} for number in range(SIZE)]
REPLIES = {row["question"]: row["answer"] for row in ROWS}


@contextmanager
def _tasks(kind: str = "generate_until", metric: str = "exact_match") -> Iterator[tuple[internals.Found, dict[str, Any]]]:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
        for task in ("one", "two"):
            text = TASK.format(name=task, tag="some", data=folder / "data.jsonl", kind=kind, metric=metric)
            (folder / f"{task}.yaml").write_text(text)
        (folder / "both.yaml").write_text(json.dumps(GROUP))
        found = internals.find_task("both", folder)
        assert found, "the group is not found"
        yield found, internals.load_tasks(found, "both")


def _evaluate(
    found: internals.Found, tasks: dict[str, Any], model: Any, asked: dict[str, list[int]], *, is_chat: bool = False
) -> Any:
    from lm_eval import simple_evaluate

    return simple_evaluate(
        model=model,
        model_args={},
        tasks=[tasks[name] for name in asked],
        task_manager=found.manager,
        samples=asked,
        num_fewshot=0 if is_chat else 1,
        apply_chat_template=is_chat,
        bootstrap_iters=0,
    )


def _model(url: str, *, is_chat: bool = False) -> Any:
    from lm_eval.api.registry import get_model

    return get_model("local-chat-completions" if is_chat else "local-completions")(
        model="reference",
        base_url=f"{url}/v1/{'chat/' if is_chat else ''}completions",
        tokenizer_backend=None,
        tokenized_requests=False,
        num_concurrent=2,
    )


def what_is_called() -> None:
    for name, wanted in CALLED.items():
        parameters = inspect.signature(_at(name)).parameters
        missing = wanted - parameters.keys()
        assert not missing, f"{name} takes no {', '.join(sorted(missing))}"


def templates() -> None:
    from lm_eval import utils

    compiled: list[str] = []
    compile_of = utils.env.compile

    def counting(source: str, *others: Any) -> Any:
        compiled.append(source)
        return compile_of(source, *others)

    utils.env.compile = counting
    internals.keep_templates()
    assert [utils.apply_template("Q: {{one}}", {"one": text}) for text in "ab"] == ["Q: a", "Q: b"]
    assert len(compiled) == 1, "lm_eval.utils.apply_template no longer compiles by lm_eval.utils.env.from_string"


def membership() -> None:
    with _tasks() as (found, tasks):
        assert found.is_group
        assert (found.names, list(tasks)) == (["one", "two"], ["one", "two"])
        assert internals._list_members(found.manager, "some") == (["one", "two"], True), "a tag's members"
        group = found.manager.load(["both"])["groups"]["both"]
        assert [(each.metric, each.aggregation, each.weight_by_size) for each in group.aggregate_metric_list] == [
            ("exact_match", "mean", True)
        ]
        scoring = {"metrics": ["exact_match"], "filters": ["none"], "kinds of output": ["generate_until"]}
        assert internals.scoring_of(tasks["one"]) == scoring


def questions() -> None:
    with _tasks() as (_, tasks):
        task = tasks["one"]
        kept = task.eval_docs
        internals.keep_questions(task)
        assert task.eval_docs is kept, "task.eval_docs no longer comes from task.test_docs"


def prompts() -> None:
    """A question has the prompt that it has when all are asked, and its reply is scored as its own."""
    with _tasks() as (found, tasks), serving(Book(REPLIES)) as url:
        internals.keep_prompts(tasks["one"])
        try:
            _evaluate(found, tasks, internals.model_without_server(), {"one": []})
        except internals.MadeError:
            made = {request.doc_id: request.args[0] for request in tasks["one"].instances}
        else:
            raise AssertionError("simple_evaluate does not call task.build_all_requests with the samples")
        assert len(made) == SIZE, "task.instances has not a request for each question"
        results = _evaluate(found, tasks, _model(url), {"one": [1, 3]})
        sent = {sample["doc_id"]: sample["arguments"][0][0] for sample in results["samples"]["one"]}
        assert sent == {number: made[number] for number in (1, 3)}, "a block's prompts are not those of the whole task"
        assert results["n-samples"]["one"] == {"original": SIZE, "effective": 2}


def records() -> None:
    """A task's configuration and version are known before its results are, in the form of the results."""
    with _tasks() as (found, tasks), serving(Book(REPLIES)) as url:
        results = _evaluate(found, tasks, _model(url), {"one": [0], "two": [1]})
        for name, task in tasks.items():
            assert json.loads(json.dumps(results["configs"][name], default=str)) == internals.record_of(task), "dump_config"
            assert str(results["versions"][name]) == internals.describe_member(name, task).task_version, "VERSION"
            assert results["results"][name]["exact_match,none"] == 1.0


def scoring() -> None:
    """A reply is scored again as the task scored it, by its own filter and its exact match, without its data."""
    config = (internals.own_scoring("gsm8k") or {}) | {"filter_list": None}
    with _tasks() as (found, tasks), serving(Book(REPLIES)) as url:
        (sample,) = _evaluate(found, tasks, _model(url), {"one": [0]})["samples"]["one"]
    again = internals.OwnScoring(config, sample["doc"]).score(sample["doc"], sample["resps"], sample["filter"])
    assert again.found == sample["filtered_resps"], "FilterEnsemble"
    assert again.target == sample["target"], "doc_to_target"
    assert again.scores == {"exact_match": sample["exact_match"]} == {"exact_match": 1.0}, "process_results"


def failed_calls() -> None:
    counted: list[int] = []
    question = ROWS[0]["question"]
    with _tasks() as (found, tasks), serving(Book(REPLIES, failing=frozenset([question]), once=True)) as url:
        model = _model(url)
        internals.count_failed(model, counted.append)
        _evaluate(found, tasks, model, {"one": [0, 1]})
    assert counted.count(1) == 3, "lm-eval no longer asks by model.amodel_call, once for each try"
    assert sum(counted) == 1, "a call that fails returns"


def failed_calls_one_by_one() -> None:
    with serving(Book({"a": "b"})) as url:
        model = _model(url)
        counted: list[int] = []
        internals.count_failed(model, counted.append)
        assert model.model_call(["Question: a\nAnswer:"], generate=True, gen_kwargs={"temperature": 0}), "no reply"
    assert counted == [1, -1]


def senders() -> None:
    """Both ways of asking, and the tokenizer that asks the server, name what they are told to, and no key."""
    book = Book({"a": "b"}, choose=lambda _: "b")
    with serving(book) as url:
        internals.send_agent("agent")
        model = _model(url)
        internals.send_no_key(model)
        with suppress(Exception):
            model.model_call(["Question: a\nAnswer:"], generate=True, gen_kwargs={"temperature": 0})
        one_by_one = len(book.headers)
        with suppress(Exception):
            asyncio.run(model.get_batched_requests(["Question: a\nAnswer:"], [None], gen_kwargs={"temperature": 0}))
        assert 0 < one_by_one < len(book.headers), "it asks in one way only"
        _at("lm_eval.utils:check_remote_tokenizer_support")(url)
    assert {headers["user-agent"] for headers in book.headers} == {"agent"}
    assert not any("authorization" in headers for headers in book.headers)


def orders() -> None:
    """Requests are sent in the order that was drawn, and the replies are those of their questions."""
    names = ["a", "bb", "ccc"]
    book = Book({name: name.upper() for name in names})
    with serving(book) as url:
        model = _model(url)
        model._concurrent = 1
        internals.order_requests(model, lambda count: [2, 0, 1][:count])
        prompts = [f"Question: {name}\nAnswer:" for name in names]
        named = {"generate": True, "gen_kwargs": {"temperature": 0}}
        replies = asyncio.run(model.get_batched_requests(prompts, [None] * 3, **named))
    assert [prompt[10:-8] for prompt in book.prompts] == ["ccc", "a", "bb"], "lm-eval sends in another order than it is given"
    assert replies == [["A"], ["BB"], ["CCC"]], "the replies are not in the order of the prompts"


def redirects() -> None:
    """Neither way of asking follows one from the model's server, which the library does by itself."""
    refused: list[int] = []
    with redirecting() as (url, asked):
        for refuses in (False, True):
            model = _model(url)
            if refuses:
                internals.refuse_redirects(model, url)
            before = len(asked)
            with suppress(Exception):
                model.model_call(["Question: a\nAnswer:"], generate=True, gen_kwargs={"temperature": 0})
            one_by_one = len(asked) - before
            with suppress(Exception):
                asyncio.run(model.get_batched_requests(["Question: a\nAnswer:"], [None], gen_kwargs={"temperature": 0}))
            refused += [one_by_one, len(asked) - before - one_by_one]
    assert refused[0] > 0, "requests.post follows no redirect any more"
    assert refused[1] > 0, "aiohttp's post follows no redirect any more"
    assert refused[2:] == [0, 0], "lm-eval no longer asks by requests.post and session.post"


def seeds() -> None:
    for is_chat in (False, True):
        with serving(Book({"a": "b"})) as url:
            model = _model(url, is_chat=is_chat)
            internals.change_requests(model, lambda messages: (messages, {"seed": 77}))
            try:
                said = [{"role": "user", "content": "a"}] if is_chat else ["a"]
                payload = model._create_payload(said, generate=True, gen_kwargs={"max_gen_toks": 3})
            except NotImplementedError as error:
                raise AssertionError(f"{type(model).__name__} has no _create_payload") from error
        assert payload["seed"] == 77, f"{type(model).__name__} makes its requests without _create_payload"


def replies() -> None:
    """Each reply is read with its own prompt, as lm-eval hashes it, and what is read of it is scored."""
    read: dict[str, str | None] = {}

    def as_read(prompt: str, _: dict[str, Any], text: str | None) -> str | None:
        read[hashlib.sha256(prompt.encode()).hexdigest()] = text
        return f"{text} or not"

    with _tasks() as (found, tasks), serving(Book(REPLIES)) as url:
        model = _model(url)
        internals.read_replies(model, as_read)
        results = _evaluate(found, tasks, model, {"one": [0, 1, 2]})
        samples = results["samples"]["one"]
        assert {sample["prompt_hash"]: sample["target"] for sample in samples} == read, (
            "prompts and replies by parse_generations"
        )
        assert [sample["resps"] for sample in samples] == [[[f"{sample['target']} or not"]] for sample in samples]


def tools() -> None:
    """A task of this project's own has its questions from a file, its tools in the requests, and verdicts on the calls."""
    function = {"name": "now", "parameters": {"properties": {}}}
    row = {"id": "simple_1", "question": [[{"role": "user", "content": "a"}]], "function": [function]}
    call = {"type": "function", "function": {"name": "now", "arguments": "{}"}}
    book = Book({"a": ""}, calls={"a": [call]})
    with tempfile.TemporaryDirectory() as name, serving(book) as url:
        folder = Path(name)
        (folder / "data.jsonl").write_text(json.dumps(row | {"ground_truth": [{"now": {}}]}))
        data = {"data_files": {"test": str(folder / "data.jsonl")}}
        own = {"include": str(OURS / "bfcl_simple.yaml"), "task": "own", "dataset_kwargs": data}
        (folder / "own.yaml").write_text(json.dumps(own))
        found = internals.find_task("own", folder)
        assert found, "the task is not found"
        tasks = internals.load_tasks(found, "own")
        assert internals.says_tools(tasks["own"].get_config("metadata")), "metadata"
        model = _model(url, is_chat=True)
        internals.change_requests(model, request_of)
        internals.read_replies(model, lambda _, choice, text: text_of(choice, text))
        results = _evaluate(found, tasks, model, {"own": [0]}, is_chat=True)
    assert [tool["function"]["name"] for tool in book.requests[0]["tools"]] == ["now"], "change_requests"
    assert [sample["filtered_resps"] for sample in results["samples"]["own"]] == [["right"]], "filter_fn"
    assert results["results"]["own"]["acc,ast"] == 1.0, "process_results"


def pictures() -> None:
    """A question names its picture, in what is hashed and kept, and the request has the picture itself."""
    drawn = [f"data:image/gif;base64,{picture}" for picture in (GIF, GIF.replace("AP8AAAAAAC", "AAD/AAAAAC"))]
    rows = [{"image": url, "question": "a", "answer": "b"} for url in drawn]
    with tempfile.TemporaryDirectory() as name, serving(Book({"a": "b"})) as url:
        data = Path(name) / "data.jsonl"
        data.write_text("".join(json.dumps(row) + "\n" for row in rows))
        text = TASK.format(name="seen", tag="some", data=data, kind="generate_until", metric="exact_match")
        (Path(name) / "seen.yaml").write_text(text + "doc_to_image: [image]\n")
        found = internals.find_task("seen", Path(name))
        assert found
        (task,) = internals.load_tasks(found, "seen").values()
        named = Pictures()
        internals.keep_questions(task, named)
        internals.keep_prompts(task, named)
        model = _model(url, is_chat=True)
        internals.change_requests(model, lambda messages: (named.put_into(messages), {}))
        results = _evaluate(found, {"seen": task}, model, {"seen": [0, 1]}, is_chat=True)
    samples = results["samples"]["seen"]
    assert [sample["exact_match"] for sample in samples] == [1.0, 1.0]
    assert len({sample["prompt_hash"] for sample in samples}) == 2, "prompts do not name their pictures"
    assert "base64" not in json.dumps(samples), "pictures are kept"


def tokens() -> None:
    asked: list[str] = []

    class Tokenizer:
        def encode(self, text: str, **_: Any) -> list[int]:
            asked.append(text)
            return [1]

    with serving(Book({})) as url:
        model = _model(url)
        internals.keep_tokens(model)
        model.tokenizer, model.tokenizer_backend, model.tokenized_requests = Tokenizer(), "remote", True
        internals.keep_tokens(model)
        for _ in range(2):
            model.tok_encode("a", add_special_tokens=False)
    assert asked == ["a"], "model.tok_encode no longer asks model.tokenizer.encode"


def prompts_of_likelihoods() -> None:
    """A group's prompts of likelihoods are made by a model that no server is behind."""
    with _tasks(kind="loglikelihood", metric="acc") as (found, tasks):
        internals.keep_prompts(tasks["one"])
        with suppress(internals.MadeError):
            _evaluate(found, tasks, internals.model_without_server(), {"one": []})
        assert {request.request_type for request in tasks["one"].instances} == {"loglikelihood"}


def names_of_files() -> None:
    from lm_eval.loggers import EvaluationTracker

    with tempfile.TemporaryDirectory() as name, _tasks() as (found, tasks), serving(Book(REPLIES)) as url:
        results = _evaluate(found, tasks, _model(url), {"one": [0]})
        samples = results.pop("samples")
        tracker = EvaluationTracker(output_path=str(Path(name) / "results.json"))
        tracker.save_results_aggregated(results=results, samples=samples)
        tracker.save_results_samples(task_name="one", samples=samples["one"])
        (results_file,) = Path(name).glob("results_*.json")
        stamp = results_file.stem.removeprefix("results_")
        assert (Path(name) / f"samples_one_{stamp}.jsonl").is_file(), "samples are not named by the task and the results' time"


PARTS: list[Callable[[], None]] = [
    *(what_is_called, membership, templates, questions, prompts, prompts_of_likelihoods, records, scoring),
    *(failed_calls, failed_calls_one_by_one, senders, orders, redirects, seeds, replies, tools, pictures, tokens),
    names_of_files,
]


def _place_of(error: Exception) -> str:
    """The last line of this project that was run, which names what it relies on, and the function that raised the error."""
    frames = traceback.extract_tb(error.__traceback__)
    ours = [frame for frame in frames if "lm_eval_" in Path(frame.filename).name]
    return f"at `{ours[-1].line if ours else ''}`, in {frames[-1].name}"


def main(arguments: list[str]) -> None:
    import lm_eval.models.openai_completions  # noqa: F401  (imported for its own sake)

    importlib.import_module("vllm_qualify.evidence.accuracy.lm_eval_worker")
    if arguments[:1] == ["--without"]:
        _, gone, *arguments = arguments
        owner, _, name = gone.rpartition(".")
        delattr(_at(owner), name)
    problems = {}
    for part in [part for part in PARTS if part.__name__ in arguments] or PARTS:
        try:
            part()
        # Whatever a moved part raises is the finding.
        except Exception as error:
            problems[part.__name__] = f"{type(error).__name__}: {error}"[:500] + f" {_place_of(error)}"
    print(json.dumps({"lm_eval": importlib.metadata.version("lm-eval"), "problems": problems}))


if __name__ == "__main__":
    main(sys.argv[1:])
