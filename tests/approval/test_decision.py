"""Decisions: who decides what about a report, once."""

from datetime import date, timedelta
from pathlib import Path
from typing import Literal

import pytest

from tests.approval.builder import (
    ADA,
    BOB_REJECTS,
    CELL,
    EXPIRES,
    NOW,
    RUN,
    TODAY,
    Change,
    decided,
    publish_report,
    waiver,
    with_gate,
    with_judgement,
)
from vllm_qualify.approval.decision import AUTOMATIC, Ruling, make_decision, read_decision, ruling
from vllm_qualify.approval.errors import DecidedError
from vllm_qualify.approval.layout import decision_key
from vllm_qualify.approval.published import PublishedRun
from vllm_qualify.errors import CallerError, StoreError
from vllm_qualify.publish.directory import DirectoryStore
from vllm_qualify.publish.store import MOST_DOCUMENT_BYTES, MissingObjectError, Store
from vllm_qualify.recipe.gates import Verdict


def test_a_decision_says_who_decided_what_about_which_report(store: Store, run: PublishedRun) -> None:
    decision = decided(store, run).decision
    assert (decision.verdict, decision.by, decision.reason, decision.automatic) == ("approve", "Ada", ADA.reason, False)
    assert (decision.cell, decision.run_id, decision.at) == (CELL, RUN, NOW)
    assert decision.expires == EXPIRES
    assert decision.report_sha256 == run.report_object.sha256
    assert decision.manifest_sha256 == run.manifest_object.sha256
    assert read_decision(store, CELL, RUN).decision == decision


def test_the_same_decision_again_finds_the_first_one(store: Store, run: PublishedRun) -> None:
    first = decided(store, run)
    again = ruling("approve", "Ada", "another reason")
    assert make_decision(store, run, again, 7, NOW + timedelta(days=400)) == first


def test_a_rejection_needs_no_passed_gates_and_has_no_end(store: Store, tmp_path: Path) -> None:
    failed = publish_report(store, tmp_path, change=with_gate("fail"))
    decision = decided(store, failed, BOB_REJECTS).decision
    assert (decision.verdict, decision.expires) == ("reject", None)


@pytest.mark.parametrize(
    ("first", "second", "message"),
    [
        (ADA, BOB_REJECTS, "already approved by Ada on 2026-03-14"),
        (ADA, ruling("approve", "Bob", "me too"), "already approved by Ada on 2026-03-14"),
        (ADA, AUTOMATIC, "already approved by Ada on 2026-03-14"),
        (AUTOMATIC, BOB_REJECTS, "already approved by recipe on 2026-03-14"),
        (BOB_REJECTS, ADA, "already rejected by Bob on 2026-03-14"),
        (BOB_REJECTS, AUTOMATIC, "already rejected by Bob on 2026-03-14"),
    ],
)
def test_another_decision_is_refused(store: Store, run: PublishedRun, first: Ruling, second: Ruling, message: str) -> None:
    kept = decided(store, run, first)
    with pytest.raises(DecidedError, match=message):
        decided(store, run, second)
    assert read_decision(store, CELL, RUN) == kept


def test_of_two_decisions_at_once_the_first_written_counts(tmp_path: Path) -> None:
    class Blind(DirectoryStore):
        """Sees the decision only after it has tried to write one."""

        has_tried = False

        def put_new(self, key: str, body: bytes, content_type: str) -> None:
            self.has_tried = self.has_tried or key == decision_key(CELL, RUN)
            super().put_new(key, body, content_type)

        def get(self, key: str, most_bytes: int = MOST_DOCUMENT_BYTES) -> bytes:
            if key == decision_key(CELL, RUN) and not self.has_tried:
                raise MissingObjectError("not yet", "look again", key)
            return super().get(key, most_bytes)

    run = publish_report(DirectoryStore(tmp_path / "store"), tmp_path / "runs")
    first = decided(DirectoryStore(tmp_path / "store"), run)
    assert decided(Blind(tmp_path / "store"), run, now=NOW + timedelta(hours=1)) == first
    with pytest.raises(DecidedError, match="already approved by Ada"):
        decided(Blind(tmp_path / "store"), run, BOB_REJECTS)


YESTERDAY = TODAY - timedelta(days=1)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (with_gate("fail"), "ttft_p99_ms: fail"),
        (with_gate("inconclusive"), "ttft_p99_ms: inconclusive"),
        (with_gate("invalid", waiver(date.max)), "ttft_p99_ms: invalid"),
        (with_gate("fail", waiver(YESTERDAY)), "ttft_p99_ms: fail, its waiver expired after 2026-03-13"),
        (with_gate("fail", expired=waiver(YESTERDAY)), "ttft_p99_ms: fail, its waiver expired after 2026-03-13"),
    ],
    ids=["failed", "inconclusive", "invalid", "waiver-expired-since", "waiver-expired-before"],
)
@pytest.mark.parametrize("wanted", [ADA, AUTOMATIC], ids=["a person", "the recipe"])
def test_a_report_that_did_not_pass_is_approved_by_nobody(
    store: Store, tmp_path: Path, change: Change, message: str, wanted: Ruling
) -> None:
    run = publish_report(store, tmp_path, change=change)
    with pytest.raises(CallerError) as raised:
        decided(store, run, wanted)
    assert f"run {RUN} cannot be approved: {message}" in str(raised.value)
    assert "waive each gate by name" in raised.value.remedy
    assert f"vllm-qualify rejudge {RUN}" in raised.value.remedy
    assert not store.exists(decision_key(CELL, RUN))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (with_judgement(gates=[]), "it has no verdict on smoke_model_identity"),
        (with_judgement(verdict="fail"), f"run {RUN} cannot be approved: its verdict is fail"),
    ],
    ids=["without gates", "failed by its own word"],
)
def test_a_report_that_contradicts_itself_is_not_approved(store: Store, tmp_path: Path, change: Change, message: str) -> None:
    with pytest.raises(CallerError, match=message):
        decided(store, publish_report(store, tmp_path, change=change))


@pytest.mark.parametrize(
    ("verdict", "last_day", "expires"),
    [
        ("fail", TODAY, TODAY + timedelta(days=1)),
        ("fail", EXPIRES - timedelta(days=1), EXPIRES),
        ("fail", EXPIRES, EXPIRES),
        ("fail", date.max, EXPIRES),
        ("pass", TODAY, EXPIRES),
    ],
    ids=["this day", "a day sooner", "the same day", "never", "nothing rests on it"],
)
def test_an_approval_ends_with_the_waiver_that_it_rests_on(
    store: Store, tmp_path: Path, verdict: Verdict, last_day: date, expires: date
) -> None:
    run = publish_report(store, tmp_path, change=with_gate(verdict, waiver(last_day)))
    assert decided(store, run, AUTOMATIC if verdict == "pass" else ADA).decision.expires == expires


def test_the_recipe_approves_nothing_that_rests_on_a_waiver(store: Store, tmp_path: Path) -> None:
    run = publish_report(store, tmp_path, change=with_gate("inconclusive", waiver(EXPIRES)))
    with pytest.raises(CallerError, match=r"rests on a waiver \(ttft_p99_ms\)"):
        decided(store, run, AUTOMATIC)
    assert not store.exists(decision_key(CELL, RUN))


@pytest.mark.parametrize(
    ("by", "reason"),
    [("", "why not"), ("Ada", " \n "), ("A\x1b[2Jda", "why not"), ("Ada\u202eeve", "why not"), ("recipe", "me")],
)
@pytest.mark.parametrize("verdict", ["approve", "reject"])
def test_names_and_reasons_can_be_shown(verdict: Literal["approve", "reject"], by: str, reason: str) -> None:
    with pytest.raises(CallerError):
        ruling(verdict, by, reason)


def test_line_breaks_of_a_form_become_spaces() -> None:
    assert ruling("reject", " Ada\tLovelace\n", "too\r\nslow\n") == ruling("reject", "Ada Lovelace", "too slow")


def test_a_decision_about_another_report_is_not_gone_on_with(store: Store, tmp_path: Path, run: PublishedRun) -> None:
    other = publish_report(DirectoryStore(tmp_path / "other"), tmp_path / "others", change=with_gate("pass", waiver(TODAY)))
    decided(store, run)
    with pytest.raises(StoreError, match="about another report"):
        decided(store, other)
