"""The paths as the page has them: with proof and measures, replies that differ beside cold ones, and what is left out."""

from tests.builders.changed import changed
from tests.report.builder import detailed_report
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
    assert path_rows(changed(detailed_report(), "details", paths=None)) == []
