"""Replies with a form on a start whose first form was another one: asked, judged, and wanted only where they tell something."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.builders.paths import running
from tests.builders.plans import document, engine, plans_of
from tests.fakes.block_cache import MODEL, BlockCache, Fault
from tests.recipes import Document
from vllm_qualify.engine.environment import EngineEnvironment
from vllm_qualify.engine.kinds.registry import KINDS
from vllm_qualify.evidence.measurement import Measurement
from vllm_qualify.evidence.paths.constrained import EXCHANGES
from vllm_qualify.evidence.paths.reordered import FIRST, HOW, measure_reordered, parse_reordered
from vllm_qualify.evidence.stages.serve import SERVE
from vllm_qualify.plan.gates import judged_by
from vllm_qualify.recipe.contract import Capability
from vllm_qualify.recipe.metrics import REORDERED, path_metric
from vllm_qualify.recipe.paths import Paths
from vllm_qualify.recipe.recipe import Recipe
from vllm_qualify.recipe.serving import VLLM

__all__ = ["document", "engine"]

PROMISED: tuple[Capability, ...] = ("chat", "json_schema", "tools")


def asked(folder: Path, fault: Fault) -> Measurement:
    folder.mkdir(exist_ok=True)
    with running(BlockCache(fault), folder) as server:
        measure_reordered(server, Paths(), PROMISED, folder / REORDERED)
    return parsed(folder)


def parsed(folder: Path) -> Measurement:
    return parse_reordered(folder / REORDERED, MODEL, PROMISED, KINDS[VLLM], f"serve/warm-1/{REORDERED}")


@pytest.fixture(scope="module")
def healthy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files of a healthy server. Do not change them."""
    folder = tmp_path_factory.mktemp("reordered")
    asked(folder, "none")
    return folder


def test_a_server_that_keeps_the_forms_by_both_backends_passes(healthy: Path) -> None:
    row = parsed(healthy)
    assert (row.value, row.finding, row.sample_count) == (1, "", 129)


def test_a_backend_that_only_the_other_order_chooses_is_found(tmp_path: Path) -> None:
    row = asked(tmp_path, "other backend")
    assert row.value == 0
    assert "32 of 128 replies do not have their form" in row.finding
    assert "name the `backend` in `structured-outputs-config`" in row.finding


def test_the_first_form_itself_must_be_kept(tmp_path: Path) -> None:
    row = asked(tmp_path / "paths", "thoughts as content")
    assert (row.value, row.is_unproven) == (None, True)
    shutil.rmtree(tmp_path / "paths" / REORDERED)
    healthy = asked(tmp_path / "paths", "none")
    first = tmp_path / "paths" / REORDERED / FIRST
    first.write_text(first.read_text().replace('\\\\\\"size\\\\\\": 2', '\\\\\\"size\\\\\\": 3'))
    row = parsed(tmp_path / "paths")
    assert (healthy.value, row.value) == (1, 0)
    assert "the first form of all: 1 of 1 replies" in row.finding


def test_a_server_that_refuses_the_other_form_proves_nothing(tmp_path: Path) -> None:
    row = asked(tmp_path, "one backend")
    assert (row.value, row.is_unproven) == (None, True)
    assert "HTTP 400" in (row.invalid_because or "")


UNUSABLE_FILES: dict[str, Callable[[Path], object]] = {
    "none at all": shutil.rmtree,
    "no first form": lambda folder: (folder / FIRST).unlink(),
    "two first forms": lambda folder: (folder / FIRST).write_text(2 * (folder / FIRST).read_text()),
    "not how": lambda folder: (folder / HOW).write_text("[" * 100_000),
    "fewer replies": lambda folder: (folder / EXCHANGES).write_text((folder / EXCHANGES).read_text().split("\n", 1)[1]),
    "other requests": lambda folder: (folder / HOW).write_text('{"brief_tok": 1}'),
    "no reply": lambda folder: (folder / EXCHANGES).write_text(
        (folder / EXCHANGES).read_text().replace('"status":200', '"problem":"ReadTimeout"', 1)
    ),
}


@pytest.mark.parametrize("what", UNUSABLE_FILES)
def test_what_is_broken_or_lost_is_invalid_whoever_asked(healthy: Path, tmp_path: Path, what: str) -> None:
    shutil.copytree(healthy / REORDERED, tmp_path / REORDERED)
    UNUSABLE_FILES[what](tmp_path / REORDERED)
    row = parsed(tmp_path)
    assert (row.value, row.is_unproven) == (None, False)


def reordering(document: Document, **changes: Any) -> Document:
    serving = document["gpu_types"]["cpu"]
    serving |= {"warm_starts": 1} | changes
    for profile in serving["profiles"].values():
        profile["paths"] = {}
    return document | {"capabilities": [*PROMISED]}


WANTED: dict[str, tuple[Callable[[Document], object], bool]] = {
    "a warm start": (lambda _: None, True),
    "no warm start": (lambda document: document["gpu_types"]["cpu"].update(warm_starts=0), False),
    "no promise": (lambda document: document.update(capabilities=["chat", "tools"]), False),
    "left out": (lambda document: _leave_out(document, REORDERED), False),
    "no forms": (lambda document: _leave_out(document, "constrained"), False),
    "a backend": (lambda document: _name_backend(document, {"backend": "guidance"}), False),
    "the automatic backend": (lambda document: _name_backend(document, {"backend": "auto"}), True),
}


def _leave_out(document: Document, path: str) -> None:
    for profile in document["gpu_types"]["cpu"]["profiles"].values():
        profile["paths"] = {"leave_out": {path: "it is slow"}}


def _name_backend(document: Document, settings: Document) -> None:
    document["gpu_types"]["cpu"].setdefault("server", {})["structured-outputs-config"] = settings


@pytest.mark.parametrize("case", WANTED)
def test_forms_are_asked_for_in_the_other_order_where_that_can_tell_something(
    document: Document, engine: EngineEnvironment, case: str
) -> None:
    change, is_wanted = WANTED[case]
    change(document := reordering(document))
    for plan in plans_of(document, engine):
        assert (path_metric(REORDERED) in {gate.metric for gate in plan.gates}) == is_wanted


def test_a_run_without_that_start_is_not_judged_by_it_later(document: Document, engine: EngineEnvironment) -> None:
    before = next(iter(plans_of(reordering(document, warm_starts=0), engine)))
    again = judged_by(before, Recipe.model_validate(reordering(document)))
    assert path_metric(REORDERED) not in {gate.metric for gate in again.gates}


def test_a_gate_on_it_is_judged_by_the_files_of_the_first_warm_start(
    document: Document, engine: EngineEnvironment, healthy: Path, tmp_path: Path
) -> None:
    plan = next(iter(plans_of(reordering(document), engine)))
    plan = plan.model_copy(update={"server": plan.server.model_copy(update={"served_model_name": MODEL})})
    shutil.copytree(healthy / REORDERED, tmp_path / "serve/warm-1" / REORDERED)
    rows = {row.metric: row for row in SERVE.parse(plan, tmp_path)}
    assert rows[path_metric(REORDERED)].value == 1
