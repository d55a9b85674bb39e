"""The paths of answers through a server with a cache in blocks, healthy and with one fault each."""

import json
import random
import shutil
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.builders.paths import AT_ONCE, SETTINGS, asker, measured, measured_of, parsed
from tests.fakes.block_cache import BLOCK_TOK, BlockCache, Fault, gaussian
from vllm_qualify.errors import ReleaseError
from vllm_qualify.evidence.paths.changes import nll_changes_nat
from vllm_qualify.evidence.paths.replies import Place, Reply
from vllm_qualify.recipe.metrics import PATHS, RECOVERED, path_metric


@pytest.fixture(autouse=True)
def _recovers_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vllm_qualify.evidence.paths.kinds.RECOVERS_WITHIN_S", 0.9)
    monkeypatch.setattr("vllm_qualify.evidence.paths.kinds.MOST_WAITED_S", 1.0)


@pytest.fixture(scope="module")
def healthy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files of a healthy server's paths. Do not change them."""
    folder = tmp_path_factory.mktemp("paths") / "healthy"
    measured(folder, BlockCache(noise=gaussian(0.05)))
    return folder


@pytest.fixture
def evidence(healthy: Path, tmp_path: Path) -> Path:
    """A copy of these files."""
    return shutil.copytree(healthy, tmp_path / "copy")


def test_a_healthy_server_with_noise_passes_on_all_paths(healthy: Path) -> None:
    rows = parsed(healthy)
    assert {path: rows[path_metric(path)].invalid_because for path in PATHS} == dict.fromkeys(PATHS)
    assert {path: rows[path_metric(path)].value for path in PATHS} == dict.fromkeys(PATHS, 1.0)
    assert rows["path_cached_changed_share"].value == 0
    interval = rows["path_cached_changed_share"].interval
    assert interval is not None
    assert 0.03 < interval.upper < 0.2
    change = rows["path_evicted_first_token_nll_change_nat"]
    assert change.value is not None
    assert abs(change.value) < 0.1
    assert (rows[RECOVERED].value or 9) < 1


FAULTS: dict[Fault, str] = {"swapped": "concurrent", "corrupt block": "cached", "stale block": "evicted"}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_found_on_its_path(tmp_path: Path, fault: Fault) -> None:
    rows = measured(tmp_path / "paths", BlockCache(fault, one_in=4, noise=gaussian(0.05)))
    row = rows[path_metric(FAULTS[fault])]
    assert (row.value, row.invalid_because) == (0, None)
    assert "of 48 answers changed" in row.finding
    assert row.traced_to[0].startswith(f"paths/{FAULTS[fault]}/replies.jsonl:")


def test_a_server_that_does_not_keep_salts_apart_fails_and_proves_nothing_else(tmp_path: Path) -> None:
    """What one tenant asked is found by another one, and no answer is cold that others could be held against."""
    rows = measured(tmp_path / "paths", BlockCache("shared salts", noise=gaussian(0.05)))
    assert (rows["path_cold"].value, rows["path_cold"].invalid_because) == (0, None)
    assert "reads from others' cache" in rows["path_cold"].finding
    others = [rows[path_metric(path)] for path in PATHS if path != "cold"]
    assert all("came from the prefix cache" in (row.invalid_because or "") and row.is_unproven for row in others)


def test_a_fault_that_needs_no_answers_is_found_with_a_model_that_shows_nothing(tmp_path: Path) -> None:
    measured(tmp_path / "paths", BlockCache("one answer"))
    after = tmp_path / "paths/aborted/recovered.json"
    after.write_text(after.read_text().replace('"waited_s":', '"waited_s":30'))
    rows = parsed(tmp_path / "paths")
    assert (rows["path_aborted"].value, rows["path_cached"].is_unproven) == (0, True)


def test_a_server_that_keeps_the_blocks_of_aborted_requests_does_not_recover(tmp_path: Path) -> None:
    rows = measured(tmp_path / "paths", BlockCache("leaking aborts"))
    recovered = rows[RECOVERED].value
    assert recovered is not None
    assert recovered >= 1
    assert (rows["path_aborted"].value, rows["path_aborted"].finding[:26]) == (0, "1 s after clients hung up,")


@pytest.mark.parametrize(
    ("fault", "finding"),
    [("other weights", "48 of 48 answers changed"), ("stale memory", "whose memory was given back while the server slept")],
)
def test_a_server_that_is_not_the_same_after_it_slept_fails(tmp_path: Path, fault: Fault, finding: str) -> None:
    rows = measured(tmp_path / "paths", BlockCache(fault, noise=gaussian(0.05)))
    assert finding in rows["path_awake"].finding
    assert {path for path in PATHS if rows[path_metric(path)].value != 1} == {"awake"}


def test_a_server_that_does_not_wake_up_is_the_releases_fault(tmp_path: Path) -> None:
    with pytest.raises(ReleaseError, match=r"slept and did not wake up: after /wake_up its /is_sleeping says .*true"):
        measured(tmp_path / "paths", BlockCache("asleep"))


def test_a_server_that_takes_no_requests_to_sleep_proves_nothing(tmp_path: Path) -> None:
    row = measured(tmp_path / "paths", BlockCache("sleepless"))["path_awake"]
    assert "the server did not sleep: ValueError: HTTP 404" in (row.invalid_because or "")
    assert row.is_unproven


def test_without_a_cache_nothing_is_said_of_it(tmp_path: Path) -> None:
    rows = measured(tmp_path / "paths", BlockCache("no cache"))
    assert "0% of the prompts came from its prefix cache" in (rows["path_cached"].invalid_because or "")
    left_out = SETTINGS.model_copy(update={"leave_out": {"cached": "the cache is off"}})
    assert "path_cached" not in parsed(tmp_path / "paths", left_out)


def test_what_is_brought_back_from_elsewhere_was_pushed_out_too(tmp_path: Path) -> None:
    rows = measured(tmp_path / "paths", BlockCache("offload", blocks=256))
    assert (rows["path_evicted"].value, rows["path_evicted"].invalid_because) == (1, None)
    lines = (tmp_path / "paths/evicted/replies.jsonl").read_text().splitlines()
    told = [json.loads(line)["reply"]["usage"]["prompt_tokens_details"]["cached_tokens"] for line in lines]
    assert min(told) > 0


def test_answers_that_changed_fail_a_path_that_is_not_proven_too(tmp_path: Path) -> None:
    """What is no longer in the cache and is found there all the same has the counters of what was not pushed out."""
    measured(tmp_path / "paths", BlockCache("stale block", one_in=4, noise=gaussian(0.05)))
    after = tmp_path / "paths/evicted/metrics-after.txt"
    gained = after.read_text().replace("prefix_cache_hits_total ", "prefix_cache_hits_total 9")
    after.write_text(gained)
    row = parsed(tmp_path / "paths")["path_evicted"]
    assert (row.value, row.invalid_because) == (0, None)
    assert "answers changed" in row.finding
    assert "at most 10% may" in row.finding


def test_a_server_with_one_answer_to_everything_shows_nothing(tmp_path: Path) -> None:
    rows = measured(tmp_path / "paths", BlockCache("one answer"))
    for path in PATHS:
        assert "only 0% would be seen in place of the right ones" in (rows[path_metric(path)].invalid_because or "")


def test_clients_hang_up_before_the_first_token_and_after_it(healthy: Path) -> None:
    hung_up = [json.loads(line) for line in (healthy / "aborted/hung-up.jsonl").read_text().splitlines()]
    assert len(hung_up) == 24
    assert sum(each["reply_began"] and not each["reply_ended"] for each in hung_up) >= 12


def test_the_second_cold_pass_has_other_batches(healthy: Path) -> None:
    began = [
        [json.loads(line)["began_s"] for line in (healthy / name / "replies.jsonl").read_text().splitlines()]
        for name in ("cold", "cold-again")
    ]
    assert began[0][0] < began[0][-1]
    assert began[1][0] > began[1][-1]


def test_fillers_do_not_count_as_prompts_that_were_pushed_out(evidence: Path) -> None:
    """The counters of `evicted` begin after what pushed the prompts out."""
    before, after = ((evidence / f"evicted/metrics-{when}.txt").read_text() for when in ("before", "after"))
    queries = [int(page.partition("prefix_cache_queries_total ")[2].split()[0]) for page in (before, after)]
    lines = (evidence / "evicted/replies.jsonl").read_text().splitlines()
    assert queries[1] - queries[0] == sum(json.loads(line)["reply"]["usage"]["prompt_tokens"] for line in lines)


def test_the_change_of_the_first_token_is_near_zero_on_a_server_with_noise() -> None:
    """What is likeliest by chance is less likely the next time: one direction alone would be above 0.1."""
    drawn = random.Random(5)

    def reply() -> Reply:
        likely = {token: drawn.gauss(-2, 0.5) for token in range(8)}
        return Reply((Place(max(likely, key=likely.__getitem__), likely),), 0.0, 1.0, 1, None)

    changes = nll_changes_nat([reply() for _ in range(4000)], [reply() for _ in range(4000)])
    assert abs(statistics.fmean(changes)) < 0.03


def test_prompts_that_kept_the_server_busy_push_out_too(healthy: Path, tmp_path: Path) -> None:
    assert _asked_tok(healthy / "concurrent/beside.jsonl") > 1.2 * BlockCache().blocks * BLOCK_TOK
    assert (healthy / "evicted/fillers.jsonl").read_text() == ""
    large = BlockCache(blocks=2048)
    rows = measured(tmp_path / "paths", large, SETTINGS.model_copy(update={"num_prompts": 16}))
    wanted_tok = 1.2 * large.blocks * BLOCK_TOK
    pushed_tok = sum(_asked_tok(tmp_path / "paths" / name) for name in ("concurrent/beside.jsonl", "evicted/fillers.jsonl"))
    assert wanted_tok <= pushed_tok + 1
    assert pushed_tok < wanted_tok + SETTINGS.filler_tok
    assert rows["path_evicted"].value == 1


def _asked_tok(path: Path) -> int:
    return sum(json.loads(line)["prompt_tok"] for line in path.read_text().splitlines())


def _refuse_all(folder: Path) -> None:
    refusal = {"reply": None, "problem": "ValueError: HTTP 400: no"}
    for at in range(48):
        _change_line(folder / "cached/replies.jsonl", lambda line: line.update(refusal), at)


UNUSABLE_FILES: dict[str, tuple[Callable[[Path], object], bool]] = {
    "one reply of the cache failed": (
        lambda folder: _change_line(
            folder / "cached/replies.jsonl", lambda line: line.update(reply=None, problem="ValueError: HTTP 500: oh")
        ),
        False,
    ),
    "all were refused": (_refuse_all, True),
    "no counters": (lambda folder: (folder / "cached/metrics-after.txt").unlink(), False),
    "no second cold pass": (lambda folder: (folder / "cold-again/replies.jsonl").unlink(), False),
    "no replies": (lambda folder: (folder / "cached/replies.jsonl").write_text(""), False),
}


@pytest.mark.parametrize("what", UNUSABLE_FILES)
def test_only_a_path_that_the_server_does_not_take_is_unproven(evidence: Path, what: str) -> None:
    """Files that are broken or lost could have shown a fault. They make the path invalid, whoever asked for it."""
    change, is_unproven = UNUSABLE_FILES[what]
    change(evidence)
    row = parsed(evidence)["path_cached"]
    assert (row.value, row.is_unproven) == (None, is_unproven)


def test_a_path_without_its_proof_is_unproven(tmp_path: Path) -> None:
    row = measured(tmp_path / "paths", BlockCache("no cache"))["path_cached"]
    assert (row.value, row.is_unproven) == (None, True)


def test_a_server_that_does_not_recover_fails_also_if_a_client_got_no_stream(tmp_path: Path) -> None:
    folder = tmp_path / "paths"
    measured(folder, BlockCache("leaking aborts"))
    _change_line(folder / "aborted/hung-up.jsonl", lambda line: line.update(problem="ReadError: lost"))
    row = parsed(folder)["path_aborted"]
    assert row.value == 0
    assert "got no stream" in row.finding


@pytest.mark.parametrize("is_promised", [False, True])
def test_where_batches_are_promised_not_to_matter_the_tokens_must_be_the_same(tmp_path: Path, is_promised: bool) -> None:
    """Two tokens are about equally likely at each place, and a batch decides which one is taken."""
    cache = BlockCache(noise=gaussian(0.02), gaps_nat=(0.0,))
    ours = asker()._replace(is_invariant=is_promised)
    rows = measured_of(tmp_path / "paths", cache, ours, AT_ONCE)
    values = {path: rows[path_metric(path)].value for path in PATHS}
    assert values == dict.fromkeys(PATHS, 0.0 if is_promised else 1.0) | {"cached": 1.0, "evicted": 1.0, "awake": 1.0}
    said = "VLLM_BATCH_INVARIANT promises the same tokens" in rows["path_concurrent"].finding
    assert said == is_promised


def test_a_cache_too_large_to_be_filled_is_not_called_evicted(tmp_path: Path) -> None:
    rows = measured(tmp_path / "paths", BlockCache(blocks=100_000), SETTINGS.model_copy(update={"most_filler_tok": 10_000}))
    assert "raise most_filler_tok" in (rows["path_evicted"].invalid_because or "")
    assert rows["path_cached"].value == 1


# Evidence that is not what it should be makes its path invalid, and no other.


def _change_line(path: Path, change: Callable[[Any], object], number: int = 3) -> None:
    lines = path.read_text().splitlines()
    document = json.loads(lines[number])
    change(document)
    lines[number] = json.dumps(document)
    path.write_text("\n".join(lines) + "\n")


def _reply(change: Callable[[Any], object]) -> Callable[[Path], None]:
    return lambda folder: _change_line(folder / "cached/replies.jsonl", lambda line: change(line["reply"]))


def _logprobs(change: Callable[[Any], object]) -> Callable[[Path], None]:
    return _reply(lambda reply: change(reply["choices"][0]["logprobs"]))


def _drop_line(folder: Path) -> None:
    path = folder / "cached/replies.jsonl"
    path.write_text("".join(path.read_text().splitlines(keepends=True)[1:]))


def _copy_cold(folder: Path) -> None:
    """Another prompt's reply under each number."""
    lines = (folder / "cached/replies.jsonl").read_text().splitlines()
    (folder / "cached/replies.jsonl").write_text("\n".join([*lines[1:], lines[0]]))


HOSTILE: dict[str, Callable[[Path], object]] = {
    "a prompt is missing": _drop_line,
    "in another order": _copy_cold,
    "no file": lambda folder: (folder / "cached/replies.jsonl").unlink(),
    "no counters": lambda folder: (folder / "cached/metrics-after.txt").unlink(),
    "another model": _reply(lambda reply: reply.update(model="other")),
    "more cached than the prompt has": _reply(lambda reply: reply["usage"]["prompt_tokens_details"].update(cached_tokens=9999)),
    "cached tokens below zero": _reply(lambda reply: reply["usage"]["prompt_tokens_details"].update(cached_tokens=-1)),
    "no usage": _reply(lambda reply: reply.pop("usage")),
    "no choice": _reply(lambda reply: reply.update(choices=[])),
    "a reply of no token": _logprobs(lambda of: [of[name].clear() for name in of]),
    "lists of two lengths": _logprobs(lambda of: of["tokens"].pop()),
    "a token that is no id": _logprobs(lambda of: of["tokens"].__setitem__(0, "token_id:x")),
    "NaN": _logprobs(lambda of: of["token_logprobs"].__setitem__(0, float("nan"))),
    "above zero": _logprobs(lambda of: of["token_logprobs"].__setitem__(0, 0.5)),
    "text for a number": _logprobs(lambda of: of["token_logprobs"].__setitem__(0, "-0.5")),
    "another prompt": lambda folder: _change_line(folder / "cached/replies.jsonl", lambda line: line.update(digest="0" * 64)),
    "another salt": lambda folder: _change_line(folder / "cached/replies.jsonl", lambda line: line.update(salt="salt-other-3")),
    "a reply that never came": lambda folder: _change_line(
        folder / "cached/replies.jsonl", lambda line: line.update(reply=None, problem="ReadTimeout")
    ),
    "an endless list": lambda folder: (folder / "cached/replies.jsonl").write_text("[" * 100_000),
}


@pytest.mark.parametrize("what", HOSTILE)
def test_hostile_files_of_a_path_make_it_alone_invalid(evidence: Path, what: str) -> None:
    HOSTILE[what](evidence)
    rows = parsed(evidence)
    assert rows["path_cached"].invalid_because
    assert rows["path_cached_changed_share"].invalid_because
    assert [rows[path_metric(path)].value for path in PATHS if path != "cached"] == [1.0] * 5


@pytest.mark.parametrize(("folder", "path"), [("cold-again", "cold"), ("cached", "cached"), ("concurrent", "concurrent")])
def test_a_reply_of_another_length_has_changed(evidence: Path, folder: str, path: str) -> None:
    """The end of a reply is ignored, so that each has as many tokens as were asked for: this one is two that were mixed up."""

    def lengthen(line: Any) -> None:
        for of in line["reply"]["choices"][0]["logprobs"].values():
            of.append(of[-1])

    _change_line(evidence / folder / "replies.jsonl", lengthen)
    for number in (1, 2):
        shutil.copytree(evidence / "cold", evidence / f"doubted-{number}", dirs_exist_ok=True)
        lines = (evidence / "cold/replies.jsonl").read_text().splitlines()[3]
        again = lines.replace("salt-cold-", f"salt-doubted-{number}-")
        (evidence / f"doubted-{number}/replies.jsonl").write_text(f"{again}\n")
    rows = parsed(evidence)
    assert {each for each in PATHS if rows[path_metric(each)].value == 0} == {path}
    assert "by 100.0 nat" in rows[path_metric(path)].finding


def test_without_cold_answers_nothing_is_judged(evidence: Path) -> None:
    (evidence / "cold-again/replies.jsonl").unlink()
    assert all(parsed(evidence)[path_metric(path)].invalid_because for path in PATHS)


def test_a_path_is_not_proven_by_fillers_that_failed_or_never_ran(evidence: Path) -> None:
    (evidence / "concurrent/beside.jsonl").write_text("")
    assert "no other prompts" in (parsed(evidence)["path_concurrent"].invalid_because or "")
    hung_up = evidence / "aborted/hung-up.jsonl"
    hung_up.write_text(hung_up.read_text().replace('"reply_ended":false', '"reply_ended":true'))
    assert "0 of 24 clients hung up" in (parsed(evidence)["path_aborted"].invalid_because or "")


def test_a_server_with_much_noise_is_not_refused(tmp_path: Path) -> None:
    """Cold answers differ as much. What can be seen is less, and the finding of a change would say so."""
    rows = measured(tmp_path / "paths", BlockCache(noise=gaussian(0.5)))
    assert {path: rows[path_metric(path)].value for path in ("cached", "concurrent")} == {"cached": 1.0, "concurrent": 1.0}
