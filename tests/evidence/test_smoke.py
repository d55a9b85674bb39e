"""Smoke: what the captured replies say, and that a bad reply is invalid or fails its check."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.builders.accuracy import change_document as change
from tests.builders.comparisons import cell_plan
from vllm_qualify.evidence.smoke import DRAWN_REPLIES, OF_FIXED_PROMPT, REPLIES, drawn_prompt, parse_smoke, smoke_request
from vllm_qualify.evidence.stages.smoke import SMOKE
from vllm_qualify.recipe.accuracy import Smoke

CAPTURED = Path(__file__).parent / "captured" / "smoke"
PROMPT = (
    "Question: Ada has 3 boxes with 4 pens in each box. Ada gives 2 pens to Ben. How many pens does Ada have left?\nAnswer:"
)
SETTINGS = Smoke(prompt=PROMPT, max_tokens=20)
GOLDEN = " Ada has 3*4=<<3*4=12>>12 pens at first.\nThen"
CHECKS = ["smoke_model_identity", "smoke_finish_reason", "smoke_usage", "smoke_determinism", "smoke_golden"]

Document = dict[str, Any]
Change = Callable[[Document], object]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return shutil.copytree(CAPTURED, tmp_path / "smoke")


def change_replies(folder: Path, how: Change, *which: int) -> None:
    """Change the bodies of the replies `which`, by default of the second."""

    def change_answers(kept: Document) -> None:
        for number in which or (1,):
            change_body(kept["answers"][number], how)

    change(folder / "replies.json", change_answers)


def change_body(answer: Document, how: Change) -> None:
    body = json.loads(answer["body"])
    how(body)
    answer["body"] = json.dumps(body)


def failing(folder: Path, golden: str | None = GOLDEN, names: tuple[str, ...] = ("reference",)) -> list[str]:
    """The checks that do not hold; every one of them has to have a value."""
    rows = parse_smoke(folder, SETTINGS, list(names), golden)
    assert {row.value for row in rows} <= {0.0, 1.0}
    return [row.metric for row in rows if row.value == 0.0]


def assert_invalid(folder: Path, message: str) -> None:
    rows = parse_smoke(folder, SETTINGS, ["reference"], GOLDEN)
    assert [(row.metric, row.value) for row in rows] == [(check, None) for check in CHECKS]
    assert all(message in (row.invalid_because or "") for row in rows), rows


def test_the_captured_replies_hold_every_check() -> None:
    rows = parse_smoke(CAPTURED, SETTINGS, ["reference"], GOLDEN)
    assert [(each.metric, each.value, each.unit, each.sample_count, each.source) for each in rows] == [
        (metric, 1.0, "bool", 2, "smoke/replies.json") for metric in CHECKS
    ]
    without_golden = parse_smoke(CAPTURED, SETTINGS, ["reference"], None)
    assert [row.metric for row in without_golden] == CHECKS[:-1]


def test_the_captured_request_is_the_one_that_is_asked() -> None:
    assert json.loads((CAPTURED / "replies.json").read_text())["request"] == smoke_request(SETTINGS, "reference")
    assert smoke_request(SETTINGS, "reference")["temperature"] == 0


def test_another_golden_text_or_name_of_the_model_fails_its_check() -> None:
    for golden in (GOLDEN.strip(), GOLDEN + " ", "", GOLDEN.lower()):
        assert failing(CAPTURED, golden) == ["smoke_golden"]
    for names in (("llama",), ("reference", "an-alias")):
        assert failing(CAPTURED, names=names) == ["smoke_model_identity"]


@pytest.mark.parametrize(
    "how",
    [
        lambda body: body["data"][0].update(id="other"),
        lambda body: body["data"].append({"id": "other"}),
        lambda body: body["data"].clear(),
    ],
    ids=["another", "one more", "none"],
)
def test_another_list_of_models_fails_the_identity(folder: Path, how: Change) -> None:
    change(folder / "models.json", lambda answer: change_body(answer, how))
    assert failing(folder) == ["smoke_model_identity"]


def usage(prompt: Any, completion: Any, total: Any) -> Change:
    counts = {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": total}
    return lambda body: body.update(usage=counts)


def choice(**fields: Any) -> Change:
    return lambda body: body["choices"][0].update(fields)


WRONG: dict[str, tuple[Change, list[str]]] = {
    "another model": (lambda body: body.update(model="other"), ["smoke_model_identity"]),
    "aborted": (choice(finish_reason="abort"), ["smoke_finish_reason"]),
    "no reason": (choice(finish_reason=None), ["smoke_finish_reason"]),
    "short at length": (usage(34, 19, 53), ["smoke_finish_reason"]),
    "over max_tokens": (usage(34, 21, 55), ["smoke_finish_reason", "smoke_usage"]),
    "no tokens": (usage(34, 0, 34), ["smoke_finish_reason", "smoke_usage"]),
    "wrong total": (usage(34, 20, 55), ["smoke_usage"]),
    "no prompt tokens": (usage(0, 20, 20), ["smoke_usage"]),
    "another text": (choice(text="another text"), ["smoke_determinism", "smoke_golden"]),
    "one more space": (choice(text=GOLDEN + " "), ["smoke_determinism", "smoke_golden"]),
}


@pytest.mark.parametrize("which", [(0,), (1,), (0, 1)])
@pytest.mark.parametrize("wrong", WRONG)
def test_a_wrong_reply_fails_its_check_and_no_other(folder: Path, wrong: str, which: tuple[int, ...]) -> None:
    """Two equal replies are deterministic, whatever they are."""
    how, expected = WRONG[wrong]
    change_replies(folder, how, *which)
    assert failing(folder) == [check for check in expected if len(which) == 1 or check != "smoke_determinism"]


def test_a_reply_may_stop_before_its_length_but_not_beyond_it(folder: Path) -> None:
    def stopped(tokens: int) -> Change:
        return lambda body: (choice(finish_reason="stop")(body), usage(34, tokens, 34 + tokens)(body))

    change_replies(folder, stopped(7), 0, 1)
    assert failing(folder) == []
    change_replies(folder, stopped(21), 0, 1)
    assert failing(folder) == ["smoke_finish_reason", "smoke_usage"]


@pytest.mark.parametrize("name", ["models.json", "replies.json"])
def test_a_file_that_is_cut_of_another_form_or_missing_is_invalid(folder: Path, name: str) -> None:
    whole = (folder / name).read_text()
    cuts = [(whole[: int(len(whole) * share)], "JSONDecodeError") for share in (0.0, 0.02, 0.5, 0.99)]
    for text, message in [*cuts, *((other, "no usable reply") for other in ("[]", "null", "{}", "7"))]:
        (folder / name).write_text(text)
        assert_invalid(folder, message)
    (folder / name).unlink()
    assert_invalid(folder, f"No such file or directory: {name}")


ERROR = '{"error": {"message": "EngineCore encountered an issue", "code": 500}}'


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ({"status": 500, "body": ERROR}, 'HTTP 500: {"error": {"message": "EngineCore encountered an issue"'),
        ({"status": 404, "body": ""}, "HTTP 404"),
        ({"status": None, "error": "ReadTimeout: timed out"}, "ReadTimeout: timed out"),
        ({"status": 200, "body": ""}, "JSONDecodeError"),
        ({"status": 200, "body": '{"model": "reference", "choi'}, "JSONDecodeError"),
        ({"status": 200, "body": "[]"}, "not a JSON object"),
        ({"status": 200, "body": ERROR}, "KeyError"),
        ({"status": 200, "body": "[" * 100_000}, "RecursionError"),
        ({"status": 200}, "KeyError('body')"),
    ],
    ids=["500", "404", "no answer", "empty", "cut", "a list", "an error as 200", "nested without end", "no body"],
)
@pytest.mark.parametrize("where", ["models", "first", "second"])
def test_an_answer_that_is_no_reply_is_invalid(folder: Path, where: str, answer: Document, message: str) -> None:
    if where == "models":
        (folder / "models.json").write_text(json.dumps(answer))
    else:
        change(folder / "replies.json", lambda kept: kept["answers"].__setitem__(int(where == "second"), answer))
    assert_invalid(folder, message)


@pytest.mark.parametrize("which", [(0,), (1,), (0, 1)])
@pytest.mark.parametrize("text", ["", " \n\t", None])
def test_an_empty_text_is_invalid(folder: Path, text: str | None, which: tuple[int, ...]) -> None:
    change_replies(folder, choice(text=text), *which)
    assert_invalid(folder, "a reply is empty")


@pytest.mark.parametrize("count", [0, 1, 3])
def test_another_number_of_replies_is_invalid(folder: Path, count: int) -> None:
    change(folder / "replies.json", lambda kept: kept.update(answers=(kept["answers"] * 2)[:count]))
    assert_invalid(folder, f"{count} replies where 2 were asked for")


@pytest.mark.parametrize(
    ("how", "message"),
    [
        (lambda body: body.update(choices=[]), "IndexError"),
        (lambda body: body["choices"][0].pop("text"), "KeyError('text')"),
        (lambda body: body["choices"][0].pop("finish_reason"), "KeyError('finish_reason')"),
        (lambda body: body.pop("model"), "KeyError('model')"),
        (lambda body: body.pop("usage"), "KeyError('usage')"),
        (lambda body: body.update(usage=None), "TypeError"),
        (usage(None, 20, 54), "TypeError"),
        (usage(34, "20", 54), "TypeError"),
    ],
)
def test_a_reply_without_what_is_checked_is_invalid(folder: Path, how: Change, message: str) -> None:
    change_replies(folder, how)
    assert_invalid(folder, message)


# --- a prompt that was drawn for the run


@pytest.fixture
def drawn(folder: Path) -> Path:
    """The same files with replies to a second prompt, of which the first one's stand for any."""
    shutil.copy(folder / REPLIES, folder / DRAWN_REPLIES)
    return folder


def change_drawn(folder: Path, how: Change, *which: int) -> list[str]:
    """The checks that do not hold once the replies to the second prompt are changed."""

    def change_answers(kept: Document) -> None:
        for number in which:
            change_body(kept["answers"][number], how)

    change(folder / DRAWN_REPLIES, change_answers)
    rows = parse_smoke(folder, SETTINGS, ["reference"], GOLDEN, has_drawn=True)
    assert [row.sample_count for row in rows] == [4, 4, 4, 2, 2]
    return [row.metric for row in rows if row.value == 0.0]


def test_a_drawn_prompt_differs_by_what_was_drawn() -> None:
    one, other = (drawn_prompt(drawn) for drawn in ("000a00140bb8" + "0" * 20, "f" * 32))
    assert one == "Question: What is 10 + 20 + 3000?\nAnswer:"
    assert other == "Question: What is 65535 + 65535 + 65535?\nAnswer:"


@pytest.mark.parametrize("which", [(0,), (1,), (0, 1)])
@pytest.mark.parametrize("wrong", WRONG)
def test_the_replies_to_a_drawn_prompt_are_held_to_all_but_their_text(drawn: Path, wrong: str, which: tuple[int, ...]) -> None:
    how, checks = WRONG[wrong]
    assert change_drawn(drawn, how, *which) == [check for check in checks if check not in OF_FIXED_PROMPT]


def test_a_model_may_say_nothing_to_a_drawn_prompt(drawn: Path) -> None:
    def says_nothing(body: Document) -> None:
        choice(text="", finish_reason="stop")(body)
        usage(12, 1, 13)(body)

    assert change_drawn(drawn, says_nothing, 0, 1) == []


def test_without_the_replies_to_a_drawn_prompt_nothing_holds(folder: Path) -> None:
    rows = parse_smoke(folder, SETTINGS, ["reference"], GOLDEN, has_drawn=True)
    assert [row.value for row in rows] == [None] * 5
    assert all(DRAWN_REPLIES in (row.invalid_because or "") for row in rows)


def test_a_plan_with_a_drawn_prompt_is_held_to_the_replies_to_it(drawn: Path) -> None:
    plan = cell_plan([]).model_copy(update={"smoke": SETTINGS, "smoke_golden": GOLDEN, "drawn": "0" * 32})
    assert [row.sample_count for row in SMOKE.parse(plan, drawn.parent)] == [4, 4, 4, 2, 2]
    (drawn / DRAWN_REPLIES).unlink()
    assert [row.value for row in SMOKE.parse(plan, drawn.parent)] == [None] * 5
