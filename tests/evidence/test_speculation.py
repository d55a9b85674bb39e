"""Speculation: what the captured files of two servers say, and that bad ones give no number."""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.builders.comparisons import DRAFTED as ARGUMENTS
from tests.builders.comparisons import server_plan
from tests.builders.loads import bounds_of
from tests.builders.loads import change as change_result
from tests.builders.speculations import CAPTURED, SETTINGS
from tests.evidence.commands import SERVER
from tests.fakes.openai_server import Book, serving
from vllm_qualify.engine.server import Server
from vllm_qualify.errors import HostError
from vllm_qualify.evidence.load import speculation
from vllm_qualify.evidence.load.greedy import DRAFTED, UNDRAFTED, Greedy, greedy_request, same_text
from vllm_qualify.evidence.load.speculation import BATCH1, PROFILE, document, draft_loads, rates, read_acceptance
from vllm_qualify.evidence.measurement import Measurement
from vllm_qualify.evidence.sequential import Levels
from vllm_qualify.recipe.load import Load

LEVELS = Levels()
SERVERS = (server_plan(**ARGUMENTS), server_plan())
LENGTH, SAME = "acceptance_length_batch1_tok", "speculative_same_text"
PAGE = "metrics-1-{}.txt"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return shutil.copytree(CAPTURED, tmp_path / "speculation")


def measured(folder: Path) -> dict[str, Measurement]:
    rows = {row.metric: row for row in speculation.parse_speculation(folder, SETTINGS, LEVELS, SERVERS[0])}
    assert list(rows) == [LENGTH, SAME]
    return rows


def reason(row: Measurement) -> str:
    assert (row.value, row.interval, row.sample_count) == (None, None, 0)
    return row.invalid_because or ""


def page(when: str, name: str = BATCH1) -> str:
    return (CAPTURED / name / DRAFTED / PAGE.format(when)).read_text()


def counting(text: str, counter: str, change: Callable[[float], object]) -> str:
    """The page with every sample of a counter, named by the end of its name, changed."""
    line = re.compile(rf"^(vllm:spec_decode_num_{counter}_total\{{.*\}}) (\S+)$", re.MULTILINE)
    assert line.search(text)
    return line.sub(lambda match: f"{match[1]} {change(float(match[2]))}", text)


def without(text: str, counter: str) -> str:
    return "\n".join(line for line in text.splitlines() if f"num_{counter}_total" not in line) + "\n"


# --- Acceptance


def test_the_captured_counters_say_what_bench_says() -> None:
    """Bench takes the counters after its warm-up, so that it sees a little less."""
    for name in (BATCH1, PROFILE):
        bench = json.loads((CAPTURED / name / DRAFTED / "bench-1.json").read_text())
        counted = read_acceptance(page("before", name), page("after", name))
        assert counted.drafts >= bench["spec_decode_num_drafts"] > 0
        assert counted.length_tok == pytest.approx(bench["spec_decode_acceptance_length"], abs=0.1)
        assert 100 * counted.rate == pytest.approx(bench["spec_decode_acceptance_rate"], abs=4)
        assert counted.rates == pytest.approx(bench["spec_decode_per_position_acceptance_rates"], abs=0.06)


def counters(drafts: float, tokens: float, *accepted: float, engine: int = 0) -> str:
    fields = {"drafts": drafts, "draft_tokens": tokens, "accepted_tokens": sum(accepted)}
    lines = [f'vllm:spec_decode_num_{name}_total{{engine="{engine}"}} {value}' for name, value in fields.items()]
    name = f'vllm:spec_decode_num_accepted_tokens_per_pos_total{{engine="{engine}"'
    lines += [f'{name},position="{position}"}} {value}' for position, value in enumerate(accepted)]
    return "\n".join([*lines, ""])


def test_acceptance_is_of_what_came_between_the_pages_and_of_all_engines() -> None:
    counted = read_acceptance(counters(100, 300, 50, 30, 20), counters(110, 330, 58, 35, 22))
    assert (counted.drafts, counted.draft_tokens, counted.accepted_at) == (10, 30, [8, 5, 2])
    assert (counted.length_tok, counted.rate, counted.rates) == (2.5, 0.5, [0.8, 0.5, 0.2])
    none, some = counters(0, 0, 0, 0), counters(10, 20, 8, 4)
    counted = read_acceptance(none + counters(0, 0, 0, 0, engine=1), some + counters(30, 60, 3, 2, engine=1))
    assert (counted.accepted_at, counted.drafts) == ([11, 6], 40)


@pytest.mark.parametrize("counter", ["drafts", "draft_tokens", "accepted_tokens", "accepted_tokens_per_pos"])
@pytest.mark.parametrize("when", ["before", "after"])
def test_a_counter_that_is_missing_is_no_zero(counter: str, when: str) -> None:
    pages = {each: page(each) for each in ("before", "after")}
    pages[when] = without(pages[when], counter)
    with pytest.raises(ValueError, match=f"no vllm:spec_decode_num_{counter}_total"):
        read_acceptance(pages["before"], pages["after"])


def gapped(drafts: int) -> str:
    """Without the position 1."""
    return counters(drafts, 2 * drafts, 0, 0).replace('position="1"', 'position="2"')


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        (counters(9, 27, 5, 3, 1), counters(9, 27, 5, 3, 1), "drafted nothing"),
        (counters(9, 27, 5, 3, 1), counters(3, 9, 3, 2, 1), "started anew"),
        (counters(0, 0, 0), counters(float("nan"), 9, 3), "started anew"),
        (counters(0, 0, 0, 0), counters(4, 8, 5, 0), "contradict"),
        (counters(0, 0, 0, 0), counters(4, 4, 4, 3), "contradict"),
        (counters(0, 0, 0, 0), counting(counters(4, 8, 3, 1), "accepted_tokens", lambda _: 5.0), "contradict"),
        (counters(0, 0, 0, 0), counters(4, 8, 3, 1, 1), "other names"),
        (gapped(0), gapped(4), r"positions \[0, 2\]"),
        ("", "", "no vllm:spec_decode"),
        ("# no answer: ConnectError\n", page("after"), "no vllm:spec_decode"),
    ],
)
def test_counters_that_cannot_be_are_refused(before: str, after: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read_acceptance(before, after)


# --- The same text


@pytest.mark.parametrize(
    ("ours", "theirs", "parts_at"),
    [
        (["12 pens", "a"], ["12 pens", "a"], [None, None]),
        (["12 pens"], ["12 cups"], [3]),
        (["12", "12 pens", ""], ["12 pens", "12", "x"], [2, 2, 0]),
    ],
)
def test_where_texts_part(ours: list[str], theirs: list[str], parts_at: list[int | None]) -> None:
    texts = same_text(ours, theirs)
    assert texts.parts_at == parts_at
    assert texts.share == parts_at.count(None) / len(parts_at)


@pytest.mark.parametrize(("ours", "theirs"), [([], []), (["a"], []), (["a"], ["a", "b"])])
def test_texts_that_lack_their_fellow_are_refused(ours: list[str], theirs: list[str]) -> None:
    with pytest.raises(ValueError, match=r"no prompt|longer|shorter"):
        same_text(ours, theirs)


def change_reply(folder: Path, number: int, change: Callable[[dict[str, Any]], object], side: str = DRAFTED) -> None:
    """Change the body of a reply, counted from 1."""
    path = folder / f"{side}.jsonl"
    answers = [json.loads(line) for line in path.read_text().splitlines()]
    body = json.loads(answers[number - 1]["body"])
    change(body)
    answers[number - 1]["body"] = json.dumps(body)
    path.write_text("".join(json.dumps(answer) + "\n" for answer in answers))


def test_the_captured_texts_are_the_same_and_one_that_parts_is_reported_with_its_place(folder: Path) -> None:
    row = measured(folder)[SAME]
    assert (row.value, row.sample_count) == (1.0, 4)
    lower, upper = bounds_of(row)
    assert lower < 0.7 < upper == 1.0
    change_reply(folder, 2, lambda body: body["choices"][0].update(text=body["choices"][0]["text"][:5] + "~"))
    row = measured(folder)[SAME]
    assert row.value == 0.75
    assert row.source.endswith("1 of 4 texts part, the first that of prompt 2 at character 5")
    assert row.traced_to == ["speculation/drafted.jsonl:2", "speculation/undrafted.jsonl:2"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda body: body["choices"][0].update(text=""), "a reply is empty"),
        (lambda body: body["choices"][0].update(text=None), "a reply is empty"),
        (lambda body: body["choices"][0].update(finish_reason="abort"), "ended by 'abort'"),
        (lambda body: body["usage"].update(completion_tokens=3), "cut after 3 of 20 tokens"),
        (lambda body: body.pop("usage"), "usage"),
        (lambda body: body["choices"].clear(), "IndexError"),
    ],
)
@pytest.mark.parametrize("side", [DRAFTED, UNDRAFTED])
def test_a_reply_that_is_none_makes_all_invalid(
    folder: Path, change: Callable[[dict[str, Any]], object], message: str, side: str
) -> None:
    change_reply(folder, 1, change, side)
    assert message in reason(measured(folder)[SAME])


@pytest.mark.parametrize("sides", [[DRAFTED], [UNDRAFTED], [DRAFTED, UNDRAFTED]])
def test_a_cut_file_of_replies_is_invalid_even_where_both_are_cut_alike(folder: Path, sides: list[str]) -> None:
    for side in sides:
        path = folder / f"{side}.jsonl"
        path.write_text("".join(path.read_text().splitlines(keepends=True)[:3]))
    assert "3 replies, and not one to each of 4" in reason(measured(folder)[SAME])


@pytest.mark.parametrize("name", [f"{DRAFTED}.jsonl", f"{UNDRAFTED}.jsonl", "greedy.json"])
def test_a_file_that_is_missing_or_torn_is_invalid(folder: Path, name: str) -> None:
    torn = folder / name
    torn.write_text(torn.read_text()[:-9])
    assert "no usable replies" in reason(measured(folder)[SAME])
    torn.unlink()
    assert name in reason(measured(folder)[SAME])


# --- The acceptance length at batch 1, and the rates


def test_the_captured_acceptance_length(folder: Path) -> None:
    row, inside = measured(folder)[LENGTH], folder / BATCH1 / DRAFTED
    pages = [[(inside / f"metrics-{n}-{when}.txt").read_text() for when in ("before", "after")] for n in (1, 2)]
    each = [read_acceptance(before, after) for before, after in pages]
    assert row.repeats == [one.length_tok for one in each]
    assert row.sample_count == sum(one.drafts for one in each)
    lower, upper = bounds_of(row)
    assert lower < (row.value or 0) < upper
    path, line = row.traced_to[0].rsplit(":", 1)
    assert path == "speculation/batch1/drafted/metrics-1-before.txt"
    assert "accepted_tokens_total{" in (folder.parent / path).read_text().splitlines()[int(line) - 1]


def lose_counters(folder: Path) -> None:
    path = folder / PAGE.format("after")
    path.write_text(without(path.read_text(), "drafts"))


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda folder: change_result(folder, 2, failed=1), "1 failed"),
        (lose_counters, "no vllm:spec_decode_num_drafts_total"),
        (lambda folder: (folder / PAGE.format("before")).unlink(), "metrics-1-before.txt"),
        (lambda folder: (folder / "bench-2.json").unlink(), "1 of at least 2 repeats"),
        (shutil.rmtree, "No such file or directory"),
    ],
)
def test_an_acceptance_length_that_nobody_can_trust_is_invalid(
    folder: Path, spoil: Callable[[Path], None], message: str
) -> None:
    spoil(folder / BATCH1 / DRAFTED)
    rows = measured(folder)
    assert message in reason(rows[LENGTH])
    assert rows[SAME].value == 1.0


@pytest.mark.parametrize("name", [BATCH1, PROFILE])
def test_the_rates_are_those_of_both_servers(folder: Path, name: str) -> None:
    rows = rates(folder, name, SETTINGS, LEVELS, SERVERS)
    for side, rate in zip((DRAFTED, UNDRAFTED), rows, strict=True):
        wanted = [json.loads((folder / name / side / f"bench-{n}.json").read_text())["output_throughput"] for n in (1, 2)]
        # Bench's own are over all of it, first wave and tail too.
        assert rate.repeats == pytest.approx(wanted, rel=0.5)
        assert rate.source == f"speculation/{name}/{side}/bench-*.json"
        assert all(path.startswith(f"speculation/{name}/{side}/bench-") for path in rate.traced_to)


# --- For the report


def test_the_document_has_the_acceptance_of_both_loads(folder: Path) -> None:
    details = document(folder, SETTINGS)
    assert [each.max_concurrency for each in (details.greedy, details.batch1, details.profile)] == [1, 1, 4]
    for drafting in (details.greedy, details.batch1, details.profile):
        assert len(drafting.rates) == 3
        assert drafting.length_tok == pytest.approx(1 + sum(drafting.rates))
        assert drafting.rate == pytest.approx(sum(drafting.rates) / 3, abs=0.05)
    assert details.texts is not None
    assert details.texts.share == 1.0
    assert type(details).model_validate_json(details.model_dump_json()) == details


def test_the_document_says_what_is_not_known(folder: Path) -> None:
    lose_counters(folder / PROFILE / DRAFTED)
    (folder / f"{DRAFTED}.jsonl").unlink()
    (folder / "greedy-after.txt").unlink()
    details = document(folder, SETTINGS)
    assert (details.profile.length_tok, details.greedy.length_tok) == (None, None)
    assert "no vllm:spec_decode_num_drafts_total" in (details.profile.invalid_because or "")
    assert "greedy-after.txt" in (details.greedy.invalid_because or "")
    assert (details.batch1.invalid_because, details.texts) == (None, None)
    (folder / PROFILE / DRAFTED / "bench-1.json").unlink()
    drafting = document(folder, SETTINGS).profile
    assert (drafting.length_tok, drafting.invalid_because) == (None, "No such file or directory: bench-1.json")


@pytest.mark.parametrize(("name", "other"), [(BATCH1, PROFILE), (PROFILE, BATCH1)])
def test_requests_that_failed_leave_nothing_of_a_load(folder: Path, name: str, other: str) -> None:
    """Neither what drafts were worth nor what they gain: half of the requests are the faster for it."""
    before = document(folder, SETTINGS)
    change_result(folder / name / DRAFTED, 2, failed=20, completed=20)
    after = document(folder, SETTINGS)
    assert getattr(after, other) == getattr(before, other)
    drafting, asked = getattr(after, name), draft_loads(SETTINGS)[name].num_prompts
    assert (drafting.length_tok, drafting.rate, drafting.rates) == (None, None, [])
    assert drafting.invalid_because == f"repeat 2: 20 of {asked} requests completed, 20 failed"
    drafted, undrafted = rates(folder, name, SETTINGS, LEVELS, SERVERS)
    assert "20 failed" in reason(drafted)
    assert undrafted.value is not None


# --- Measuring


def test_at_batch_1_there_is_one_client_and_enough_prompts_for_a_steady_state() -> None:
    many = SETTINGS.model_copy(update={"max_concurrency": 16, "num_prompts": 800, "num_warmups": 32})
    alone, whole = (draft_loads(many)[name] for name in (BATCH1, PROFILE))
    assert (alone.max_concurrency, alone.num_prompts, alone.num_warmups) == (1, 50, 2)
    assert (whole.max_concurrency, whole.num_prompts, whole.num_warmups) == (16, 800, 32)
    assert draft_loads(SETTINGS)[BATCH1].num_prompts == 20


@pytest.mark.parametrize(("repeats", "made"), [(1, 2), (3, 3)])
def test_every_load_is_repeated_and_looked_at_once(repeats: int, made: int) -> None:
    """No budget ends them: nothing is known before the last."""
    settings = SETTINGS.model_copy(update={"repeats": repeats, "most_repeats": 9, "time_budget_s": 1.0})
    assert [list(each.looks) for each in draft_loads(settings).values()] == [[made], [made]]
    assert [each.time_budget_s for each in draft_loads(settings).values()] == [None, None]


TEXTS = {"1+1?": " 2", "2+2?": " 4"}
ASKED = Greedy(prompts=[f"Question: {question}" for question in TEXTS], max_tokens=20)


def at(url: str) -> Server:
    return SERVER.model_copy(update={"url": url})


def measure(one: str, other: str, folder: Path, run: speculation.RunLoad = lambda *_: None) -> None:
    """On the servers at two addresses."""
    speculation.measure_speculation(at(one), at(other), ASKED, SETTINGS, folder, run)


def test_both_servers_are_asked_and_loaded_in_turns(tmp_path: Path) -> None:
    turns = []

    def run(server: Server, settings: Load, folder: Path, number: int) -> None:
        assert folder.is_dir()
        turns.append((server.url, settings.max_concurrency, folder.relative_to(tmp_path).as_posix(), number))

    with serving(Book(TEXTS)) as one, serving(Book(TEXTS)) as other:
        measure(one, other, tmp_path, run)
    assert turns == [
        (url, clients, f"{name}/{side}", number)
        for clients, name in ((1, "batch1"), (4, "profile"))
        for number, order in ((1, (0, 1)), (2, (1, 0)))
        for url, side in [((one, "drafted"), (other, "undrafted"))[place] for place in order]
    ]
    assert document(tmp_path, SETTINGS).texts == same_text(list(TEXTS.values()), list(TEXTS.values()))


@pytest.mark.parametrize(("repeats", "first", "last"), [(2, [1], [2]), (3, [1], [2, 3]), (5, [1, 2], [3, 4, 5])])
def test_in_turn_the_drafting_server_runs_before_and_after_the_other(
    tmp_path: Path, repeats: int, first: list[int], last: list[int]
) -> None:
    settings = SETTINGS.model_copy(update={"repeats": repeats, "most_repeats": repeats})
    done = []

    def run(server: Server, _: Load, folder: Path, number: int) -> None:
        assert folder.is_dir()
        done.append((server.url, folder.relative_to(tmp_path).as_posix(), number))

    with serving(Book(TEXTS)) as one, serving(Book(TEXTS)) as other, serving(Book({})) as again:
        urls = [one, other, again]
        for start, url in zip(speculation.starts_in_turn(settings), urls, strict=True):
            speculation.measure_start(start, at(url), ASKED, settings, tmp_path, run)
    planned = [("drafted", first), ("undrafted", list(range(1, repeats + 1))), ("drafted", last)]
    assert done == [
        (url, f"{name}/{side}", number)
        for url, (side, numbers) in zip(urls, planned, strict=True)
        for name in ("batch1", "profile")
        for number in numbers
    ]
    # The third server, which knows no answers, is asked nothing.
    assert document(tmp_path, settings).texts == same_text(list(TEXTS.values()), list(TEXTS.values()))


def test_a_server_that_says_something_else_or_refuses_a_prompt_is_reported(tmp_path: Path) -> None:
    with serving(Book(TEXTS)) as one, serving(Book(TEXTS | {"2+2?": " 5"})) as other:
        measure(one, other, tmp_path)
    assert measured(tmp_path)[SAME].value == 0.5
    for replies in tmp_path.glob("*.jsonl"):
        replies.unlink()
    with serving(Book(TEXTS)) as one, serving(Book(TEXTS, failing=frozenset({"2+2?"}))) as other:
        measure(one, other, tmp_path)
    last = json.loads((tmp_path / "undrafted.jsonl").read_text().splitlines()[-1])
    assert last["status"] == httpx.codes.INTERNAL_SERVER_ERROR
    assert "HTTP 500" in reason(measured(tmp_path)[SAME])


def test_a_load_that_fails_ends_it(tmp_path: Path) -> None:
    def run(*_: object) -> None:
        raise HostError("bench failed", "see its log", "load")

    with serving(Book(TEXTS)) as one, serving(Book(TEXTS)) as other, pytest.raises(HostError, match="bench failed"):
        measure(one, other, tmp_path, run)


def test_the_greedy_request_is_what_was_kept() -> None:
    kept = json.loads((CAPTURED / f"{DRAFTED}.jsonl").read_text().splitlines()[0])["request"]
    greedy = Greedy.model_validate_json((CAPTURED / "greedy.json").read_bytes())
    assert kept == greedy_request(greedy.prompts[0], greedy, "reference")
