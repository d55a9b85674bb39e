"""The paths as the page has them: with proof and measures, replies that differ beside cold ones, and what is left out."""

from typing import Any

import pytest

from tests.builders.changed import changed
from tests.report.builder import detailed_report
from vllm_qualify.recipe.contract import Capability, Contract
from vllm_qualify.recipe.paths import UNASKED, Paths
from vllm_qualify.report.path_rows import path_rows
from vllm_qualify.report.words import NO_BREAK


def test_each_path_has_its_verdict_its_proof_and_its_measures() -> None:
    rows = {row.path: row for row in path_rows(detailed_report())}
    assert {path: row.verdict for path, row in rows.items()} == {
        "cold": "held",
        "cached": "not held",
        "evicted": "invalid",
        "constrained": "not held",
        "aborted": "not judged",
    }
    cold, cached = rows["cold"], rows["cached"]
    told = [text.replace(NO_BREAK, " ") for text in (cold.requests, cold.took, cold.cached, cold.differing)]
    assert told == ["64", "3.2 s", "0.00 %", "0; at most 4.10 % of all such"]
    assert (cached.differing, cached.more) == ("7", 6)
    assert cached.first_token.replace(NO_BREAK, " ") == "0.02000 nat; -0.01000 to 0.05000 nat"
    assert rows["constrained"].beside == "63.5"
    assert rows["aborted"].note.startswith("the recipe leaves it out: a proxy")


def test_a_reply_that_differs_is_beside_the_cold_one_with_its_differences_marked() -> None:
    (reply,) = next(row for row in path_rows(detailed_report()) if row.path == "cached").replies
    assert (reply.line, reply.wrong) == (4, "9.1 nat from the cold reply")
    assert [text for text, is_marked in reply.cold if is_marked] == ["42"]
    (broken,) = next(row for row in path_rows(detailed_report()) if row.path == "constrained").replies
    assert broken.cold == []
    assert broken.wrong.startswith("no tool")


def test_a_path_without_usable_files_has_its_reason_alone() -> None:
    evicted = next(row for row in path_rows(detailed_report()) if row.path == "evicted")
    assert evicted.requests == "—"
    assert evicted.note.startswith("9%")
    without = path_rows(changed(detailed_report(), "details", paths=None))
    assert {row.path: (row.verdict, row.requests) for row in without} == {
        "cold": ("held", "—"),
        "cached": ("not held", "—"),
        "evicted": ("invalid", "—"),
        "constrained": ("not held", "—"),
    }


def test_a_path_that_nobody_asked_for_is_not_judged_where_it_is_not_proven() -> None:
    rows = {row.path: row for row in path_rows(changed(detailed_report(), "plan", paths=UNASKED))}
    assert (rows["evicted"].verdict, rows["cached"].verdict) == ("not judged", "not held")
    assert rows["evicted"].note.startswith("9%")


@pytest.mark.parametrize(
    ("promised", "changes", "is_told"),
    [
        (["chat", "json_schema"], {}, True),
        (["chat", "tools"], {}, False),
        (["chat", "json_schema"], {"warm_starts": 1}, False),
        (["chat", "json_schema"], {"paths": None}, False),
        (["chat", "json_schema"], {"paths": Paths(leave_out={"reordered": "one client asks for forms"})}, False),
    ],
)
def test_another_start_that_could_show_something_is_told(
    promised: list[Capability], changes: dict[str, Any], is_told: bool
) -> None:
    contract = Contract(capabilities=promised, not_asked={}, aliases=[], time_limit_s=60.0)
    report = changed(detailed_report(), "plan", **{"contract": contract, "paths": UNASKED} | changes)
    rows = {row.path: row for row in path_rows(report)}
    assert ("reordered" in rows) == is_told
    if is_told:
        assert rows["reordered"].verdict == "not judged"
        assert "`warm_starts: 1`" in rows["reordered"].note
