"""Replies that must fit a JSON schema or call a tool, from a server that keeps to it and from ones that lose some."""

import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from tests.builders.paths import measured, parsed, running
from tests.fakes.block_cache import BlockCache, Fault
from vllm_qualify.evidence.paths.constrained import LONGEST_FORM, SCHEMAS, TOOLS, FormAsking, forms_of, requests_of
from vllm_qualify.evidence.paths.measure import decide_how
from vllm_qualify.recipe.contract import Capability
from vllm_qualify.recipe.metrics import SCHEMA_VALID, TOOL_CALL_VALID
from vllm_qualify.recipe.paths import Paths

BOTH: tuple[Capability, ...] = ("chat", "json_schema", "tools")
ONLY = dict.fromkeys(("cached", "concurrent", "evicted", "aborted"), "another test has it")
SETTINGS = Paths(leave_out=ONLY, num_prompts=16, reply_tok=1, filler_tok=64, num_constrained=240)


def asked(folder: Path, cache: BlockCache, promised: Sequence[Capability] = BOTH) -> dict[str, Any]:
    return measured(folder, cache, SETTINGS, promised)


@pytest.fixture(scope="module")
def healthy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files of a healthy server: each reply has its form. Do not change them."""
    folder = tmp_path_factory.mktemp("constrained") / "healthy"
    asked(folder, BlockCache())
    return folder


@pytest.fixture
def evidence(healthy: Path, tmp_path: Path) -> Path:
    """A copy of these files."""
    return shutil.copytree(healthy, tmp_path / "copy")


def test_a_server_that_keeps_to_the_forms_passes(healthy: Path) -> None:
    rows = parsed(healthy, SETTINGS, BOTH)
    row = rows["path_constrained"]
    assert (row.value, row.invalid_because, row.sample_count, row.finding) == (1, None, 240, "")
    assert {name: (rows[name].value, rows[name].sample_count) for name in (SCHEMA_VALID, TOOL_CALL_VALID)} == {
        SCHEMA_VALID: (1, 60),
        TOOL_CALL_VALID: (1, 180),
    }
    interval = rows[SCHEMA_VALID].interval
    assert interval is not None
    assert 0.9 < interval.lower < 1


@pytest.mark.parametrize(
    ("fault", "metric", "words"),
    [
        ("cut JSON", SCHEMA_VALID, "JSON: no JSON: '{"),
        ("lost call", TOOL_CALL_VALID, "streamed call of a tool: no tool is called: ''"),
    ],
)
def test_a_reply_without_its_form_fails_the_path(tmp_path: Path, fault: Any, metric: str, words: str) -> None:
    rows = asked(tmp_path / "paths", BlockCache(fault))
    row = rows["path_constrained"]
    assert (row.value, row.invalid_because) == (0, None)
    assert words in row.finding
    assert row.traced_to[0].startswith("paths/constrained/exchanges.jsonl:")
    assert 0 < 1 - rows[metric].value < 0.05
    assert {rows[name].value for name in (SCHEMA_VALID, TOOL_CALL_VALID) if name != metric} == {1}


def test_replies_that_are_all_cut_in_their_thoughts_tell_nothing(tmp_path: Path) -> None:
    rows = asked(tmp_path / "paths", BlockCache("endless thoughts"))
    assert "240 of 240 replies were cut, with thoughts at 512 tokens" in (rows["path_constrained"].invalid_because or "")
    assert rows[TOOL_CALL_VALID].value is None


@pytest.mark.parametrize(
    ("fault", "is_brief"), [("none", True), ("endless thoughts", False), ("thoughts as content", False), ("no template", True)]
)
def test_a_reply_is_cut_early_unless_the_model_thinks_though_it_should_not(
    tmp_path: Path, fault: Fault, is_brief: bool
) -> None:
    with running(BlockCache(fault), tmp_path) as server:
        how = decide_how(server, ["What is 1 + 1?"], Paths(most_form_tok=300), has_forms=True)
    assert (how.asking.thinking_tok, how.asking.brief_tok < 100, how.asking.thinks) == (300, is_brief, not is_brief)
    requests = requests_of(forms_of(BOTH, 80), "m", how.asking)
    told = [request for request in requests if request.body and "chat_template_kwargs" in request.body]
    assert len(told) == (0 if fault == "no template" else 70)
    most = [request.body["max_tokens"] for request in requests if request.body]
    assert [most.count(300), most[70:].count(300), len(most)] == ([10, 0, 80] if is_brief else [80, 10, 80])
    longest = json.loads(LONGEST_FORM)
    assert any(Draft202012Validator(schema).is_valid(longest) for schema in SCHEMAS)


@pytest.mark.parametrize(("may_think", "value"), [(True, 1.0), (False, 0.0)])
def test_thoughts_that_a_parser_gives_as_content_tell_nothing_where_the_model_may_think(
    evidence: Path, may_think: bool, value: float
) -> None:
    def cut(line: Any) -> None:
        reply = json.loads(line["exchange"]["reply"])
        reply["choices"][0] |= {"message": {"role": "assistant", "content": "Okay, the user asks"}, "finish_reason": "length"}
        reply["usage"] = {"prompt_tokens": 5, "completion_tokens": 512, "total_tokens": 517}
        line["exchange"]["reply"] = json.dumps(reply)

    bodies = [
        json.loads(line)["exchange"]["body"] for line in (evidence / "constrained/exchanges.jsonl").read_text().splitlines()
    ]
    plain = [at for at, body in enumerate(bodies) if "response_format" in body and not body.get("stream")]
    _change(cut, next(at for at in plain if ("chat_template_kwargs" not in bodies[at]) == may_think))(evidence)
    assert parsed(evidence, SETTINGS, BOTH)["path_constrained"].value == value


@pytest.mark.parametrize("promised", [BOTH, ("chat", "tools"), ("chat", "json_schema")])
def test_each_kind_of_form_is_asked_with_thoughts_too(promised: Sequence[Capability]) -> None:
    forms = forms_of(promised, Paths().num_constrained)
    bodies = [request.body or {} for request in requests_of(forms, "m", FormAsking())]
    thinking = {
        (form.words, form.tools) for form, body in zip(forms, bodies, strict=True) if "chat_template_kwargs" not in body
    }
    assert thinking == {(form.words, form.tools) for form in forms}


@pytest.mark.parametrize(
    ("promised", "shares"),
    [(("chat",), set()), (("chat", "tools"), {TOOL_CALL_VALID}), (("chat", "json_schema"), {SCHEMA_VALID})],
)
def test_only_what_is_promised_is_asked(tmp_path: Path, promised: Sequence[Capability], shares: set[str]) -> None:
    rows = asked(tmp_path / "paths", BlockCache(), promised)
    assert {SCHEMA_VALID, TOOL_CALL_VALID} & set(rows) == shares
    assert ("path_constrained" in rows) == bool(shares)
    if shares:
        assert rows["path_constrained"].value == 1


def test_most_calls_are_streamed_and_a_fault_of_one_in_a_hundred_streams_is_seen() -> None:
    forms = forms_of(BOTH, Paths().num_constrained)
    streams = sum(form.is_streamed for form in forms if form.tools)
    assert 1 - 0.99**streams > 0.95
    assert sum(form.schema is not None for form in forms) >= 100


def test_the_forms_are_schemas_and_have_no_free_text() -> None:
    for schema in (*SCHEMAS, *TOOLS.values()):
        Draft202012Validator.check_schema(schema)
        assert '"string"' not in json.dumps(schema)


def _change(change: Callable[[Any], object], number: int = 0) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        path = folder / "constrained/exchanges.jsonl"
        lines = path.read_text().splitlines()
        document = json.loads(lines[number])
        change(document)
        lines[number] = json.dumps(document)
        path.write_text("\n".join(lines))

    return apply


def _of_content(content: str) -> Callable[[Path], None]:
    def change(line: Any) -> None:
        reply = json.loads(line["exchange"]["reply"])
        reply["choices"][0]["message"]["content"] = content
        line["exchange"]["reply"] = json.dumps(reply)

    return _change(change)


def _forget_first(folder: Path) -> None:
    path = folder / "constrained/exchanges.jsonl"
    path.write_text("".join(path.read_text().splitlines(keepends=True)[1:]))


HOSTILE: dict[str, Callable[[Path], object]] = {
    "a reply is missing": _forget_first,
    "an easier schema": _change(lambda line: line["exchange"]["body"].update(response_format={"type": "json_object"})),
    "another question": _change(lambda line: line["exchange"]["body"].update(messages=[])),
    "another name": _change(lambda line: line["exchange"].update(name="reply 2")),
    "it never came": _change(lambda line: line["exchange"].update(problem="ReadTimeout", reply="")),
    "alone": _change(lambda line: line.update(began_s=-1.0)),
    "no other requests": lambda folder: (folder / "constrained/beside.jsonl").write_text(""),
    "no file": lambda folder: (folder / "constrained/exchanges.jsonl").unlink(),
    "no counters": lambda folder: (folder / "constrained/metrics-after.txt").unlink(),
    "an endless list": lambda folder: (folder / "constrained/exchanges.jsonl").write_text("[" * 100_000),
}


@pytest.mark.parametrize("what", HOSTILE)
def test_hostile_files_make_the_path_alone_invalid(evidence: Path, what: str) -> None:
    HOSTILE[what](evidence)
    rows = parsed(evidence, SETTINGS, BOTH)
    for name in ("path_constrained", SCHEMA_VALID, TOOL_CALL_VALID):
        assert rows[name].invalid_because
    assert rows["path_cold"].value == 1


@pytest.mark.parametrize(
    "content",
    [
        "",
        "{}",
        "[]",
        '{"colour": "red"}',
        '{"colour": "red", "size": 9}',
        '{"colour": "red", "size": true}',
        '{"colour": "red", "size": 1, "more": 1}',
        '{"colour": "red", "size": 1} and',
        '```json\n{"colour": "red", "size": 1}\n```',
        '{"colour": "red", "size": NaN}',
        "[" * 100_000,
    ],
)
def test_a_reply_of_another_form_is_broken(evidence: Path, content: str) -> None:
    _of_content(content)(evidence)
    rows = parsed(evidence, SETTINGS, BOTH)
    assert rows["path_constrained"].value == 0
    assert "1 of 240 replies do not have their form: line 1, JSON" in rows["path_constrained"].finding


@pytest.mark.parametrize(
    ("content", "value"),
    [
        *(
            (text, 1)
            for text in ("", '{"colour":  \n \n', '{"colour": "r', '{"size": 1', '{"size": 1.', '{"size": -', '{"new": tr')
        ),
        *((text, 1) for text in ('{"colour": "\\u00', '{"colour": "\\', '{"answer": null', "[", '{"colour"', '{"size": 1e-')),
        *(
            (text, 0)
            for text in ('{"colour": r', "So I", "{} {", '{"colour": "red" "size"', '{"colour": "red": 2', "[1 2", "}")
        ),
        *((text, 0) for text in ('{"colour": "red",}', '{"new": tru1', '{"colour": "\\q')),
        pytest.param("[" * 100_000, 0, id="an endless list"),
    ],
)
@pytest.mark.parametrize("reason", ["length", "stop"])
def test_a_reply_that_was_cut_tells_nothing_if_it_began_well(evidence: Path, content: str, value: float, reason: str) -> None:
    """Whatever the server says why it ended: vLLM 0.26 says `tool_calls` of a call that was cut."""

    def change(line: Any) -> None:
        reply = json.loads(line["exchange"]["reply"])
        message = {"role": "assistant", "content": content, "reasoning": "So"}
        reply["choices"][0] |= {"finish_reason": reason, "message": message}
        reply["usage"] |= {"completion_tokens": 512, "total_tokens": 517}
        line["exchange"]["reply"] = json.dumps(reply)

    _change(change)(evidence)
    row = parsed(evidence, SETTINGS, BOTH)["path_constrained"]
    assert (row.value, row.sample_count) == (value, 239 + (not value))


def test_a_whole_reply_of_as_many_tokens_as_were_allowed_counts(evidence: Path) -> None:
    def change(line: Any) -> None:
        reply = json.loads(line["exchange"]["reply"])
        reply["usage"] |= {"completion_tokens": 512, "total_tokens": 517}
        line["exchange"]["reply"] = json.dumps(reply)

    _change(change)(evidence)
    row = parsed(evidence, SETTINGS, BOTH)["path_constrained"]
    assert (row.value, row.sample_count) == (1, 240)


def test_a_finish_reason_alone_makes_no_reply_one_that_was_cut(evidence: Path) -> None:
    """A server that says `length` of a short reply without thoughts has lost its form all the same."""

    def change(line: Any) -> None:
        reply = json.loads(line["exchange"]["reply"])
        reply["choices"][0] |= {"finish_reason": "length", "message": {"role": "assistant", "content": "", "reasoning": "So"}}
        line["exchange"]["reply"] = json.dumps(reply)

    _change(change)(evidence)
    assert parsed(evidence, SETTINGS, BOTH)["path_constrained"].value == 0
