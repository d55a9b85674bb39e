"""The reference is what the models make, has everything, and leads nowhere wrong."""

import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import pytest
from pydantic import BaseModel

from infra import reference_docs
from infra.reference_docs import FOLDER, PAGES, form, kinds_of, main, plural, stale, unit, words
from tests.builders.links import leads_somewhere
from vllm_qualify.judge.verdict import WORST_FIRST
from vllm_qualify.recipe.metrics import METRICS
from vllm_qualify.recipe.recipe import Recipe
from vllm_qualify.recipe.searches import Sweep
from vllm_qualify.recipe.serving import Variant
from vllm_qualify.recipe.values import Count, Name, Share, Text
from vllm_qualify.report.model import Report

WRITTEN = {name: (FOLDER / f"{name}.md").read_text(encoding="utf-8") for name in PAGES}


def models_in(annotation: Any) -> Iterator[tuple[str, type[BaseModel]]]:
    """The models inside a type, each with its steps: `.*` for every mapping or list around it."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield "", annotation
    step = ".*" if get_origin(annotation) in (dict, list) else ""
    for argument in get_args(annotation):
        for steps, model in models_in(argument):
            yield step + steps, model


def keys_of(model: type[BaseModel], place: str = "") -> dict[str, set[str]]:
    """Place in the recipe → its keys; a name that the author chooses, or a list's index, is `*`."""
    keys_by_place = {place: set(model.model_fields)}
    for name, field in model.model_fields.items():
        for steps, inner in models_in(field.annotation):
            for inner_place, keys in keys_of(inner, f"{place}.{name}{steps}".lstrip(".")).items():
                keys_by_place[inner_place] = keys_by_place.get(inner_place, set()) | keys
    return keys_by_place


def test_the_pages_are_what_the_models_make() -> None:
    """They were written by another process: nothing in them depends on when or in which order they are made."""
    assert [path.name for path in stale()] == [], "run `python -m infra.reference_docs`"


def test_check_names_a_page_that_is_not_what_the_models_make(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([], tmp_path) == 0
    assert main(["--check"], tmp_path) == 0
    (tmp_path / "gates.md").write_text(WRITTEN["gates"].replace("trustworthy", "untrustworthy"), encoding="utf-8")
    (tmp_path / "metrics.md").unlink()
    (tmp_path / "older.md").write_text("of a page that was renamed", encoding="utf-8")
    assert main(["--check"], tmp_path) == 1
    assert re.findall(r"^(\w+\.md) is not", capsys.readouterr().err, re.MULTILINE) == ["metrics.md", "gates.md", "older.md"]
    assert not (tmp_path / "metrics.md").exists()


def test_every_place_of_every_key_of_a_recipe_is_in_the_list() -> None:
    listed = re.findall(r"\[`([^`]+)`\]\((?:recipe|gates)\.md#", WRITTEN["recipe"].split("## Every key")[1])
    places = {re.sub("<[^>]+>", "*", path) for path in listed}
    assert places == {f"{place}.{key}".lstrip(".") for place, keys in keys_of(Recipe).items() for key in keys}


def test_every_metric_verdict_and_key_of_the_report_has_an_entry() -> None:
    assert [name for name in METRICS if f'<a id="{name}"></a>`{name}`' not in WRITTEN["metrics"]] == []
    assert [name for name in WORST_FIRST if f'<a id="verdict-{name}"></a>`{name}`' not in WRITTEN["gates"]] == []
    assert [key for key in Report.model_fields if f'<a id="Report.{key}"></a>`{key}`' not in WRITTEN["report"]] == []
    assert set(reference_docs.REPORT_KEYS) <= set(Report.model_fields)
    assert set(reference_docs.VERDICTS) == set(WORST_FIRST)


@pytest.mark.parametrize("name", PAGES)
def test_links_lead_to_entries_of_different_names_and_every_row_of_a_table_has_a_cell_for_each_head(name: str) -> None:
    page = FOLDER / f"{name}.md"
    links = {link for link in re.findall(r"\]\(([^)\s]+)\)", WRITTEN[name]) if "://" not in link}
    assert [link for link in sorted(links) if not leads_somewhere(page, link)] == []
    named = Counter(re.findall(r'<a id="([^"]+)"></a>', WRITTEN[name]))
    assert [anchor for anchor, count in named.items() if count > 1] == []
    tables = re.findall(r"(?:^\|.*\n)+", WRITTEN[name], re.MULTILINE)
    assert tables
    for table in tables:
        assert len({len(re.findall(r"(?<!\\)\|", row)) for row in table.splitlines()}) == 1, table


@pytest.mark.parametrize(
    ("metric", "forms"),
    [
        ("startup_s", ()),
        ("smoke_golden", ()),
        ("nccl_infiniband", ()),
        ("slo_cost_usd_mtok", ()),
        ("exact_match", ("`minimum`", "`reference` and `margin`", "`max_loss`", "`max_loss_since_anchor`")),
        ("truncated_answers", ("`maximum`", "`reference` and `margin`")),
        ("output_tok_per_answer", ("`maximum`", "`reference` and `margin`", "`max_worsening`")),
        ("output_throughput_tok_s", ("`minimum`", "`reference` and `margin`", "`max_worsening`")),
        ("ttft_p99_ms", ("`maximum`", "`reference` and `margin`", "`max_worsening`")),
        ("answer_nll_nat_per_tok", ("`max_nll_increase`",)),
        ("text_top1_share", ("`min_top1_agreement`",)),
        ("speculative_speedup", ("`minimum`", "`reference` and `margin`")),
    ],
)
def test_how_a_metric_can_be_gated(metric: str, forms: tuple[str, ...]) -> None:
    assert tuple(map(form, kinds_of(METRICS[metric]))) == forms


@pytest.mark.parametrize(
    ("hint", "expected"),
    [
        (Name, "name"),
        (Text | None, "text or null"),
        (Count, "whole number, 1 or more"),
        (list[Count], "list of whole numbers, 1 or more"),
        (Share, "number, 0 or more, at most 1"),
        (dict[Name, list[Text]], "mapping of names to lists of texts"),
        (Literal["completions", "chat"], "`completions` or `chat`"),
        (tuple[Path, Path], "2 paths"),
        (dict[Name, Variant], "mapping of names to [`variants.<name>`](recipe.md#keys-of-variants.name)"),
        (Sweep.model_fields["concurrencies"].rebuild_annotation(), "list of whole numbers, 1 or more, ascending"),
    ],
)
def test_types_in_words(hint: Any, expected: str) -> None:
    assert words(hint) == expected


def test_units_and_plurals() -> None:
    names = ("time_limit_s", "ttft_ms", "memory_limit_gib", "valid_days", "input_len", "output_throughput_tok_s", "seed")
    assert [unit(name) for name in names] == ["s", "ms", "GiB", "days", "tok", "tok/s", "—"]
    kinds = ("text or null", "server arguments", "anything", "`a` or `b`", "list of names")
    assert [plural(each) for each in kinds] == ["texts or null", "server arguments", "anything", "`a` or `b`", "lists of names"]


def test_a_key_that_is_described_nowhere_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reference_docs, "REPORT_KEYS", {})
    with pytest.raises(SystemExit, match="report_version of the report has no description"):
        PAGES["report"]()
