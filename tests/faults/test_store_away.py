"""The store goes away in the middle of a run: what was measured is not lost, and not measured again."""

import re
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from prefect import Task
from typer.testing import CliRunner

import tasks.decide
import tasks.measure
from flows.qualify import run_qualification
from infra.bench.passing import passing, write_bench_recipe, write_engine
from tests.faults.proxy import Network, network
from tests.publish.conftest import moto_settings, no_outer_settings, use
from tests.s3 import BUCKET, Settings
from vllm_qualify.cli.commands import app
from vllm_qualify.errors import CallerError, HostError, StoreError
from vllm_qualify.evidence import smoke
from vllm_qualify.evidence.accuracy import lm_eval_process
from vllm_qualify.evidence.load import client
from vllm_qualify.publish.bundle import read_manifest
from vllm_qualify.publish.stores import open_store
from vllm_qualify.runs.folder import Run
from vllm_qualify.runs.home import runs_folder
from vllm_qualify.runs.publishing import Published
from vllm_qualify.runs.request import QualifyRelease

__all__ = ["moto_settings", "no_outer_settings"]

pytestmark = [pytest.mark.prefect, pytest.mark.usefixtures("on_prefect")]


@pytest.fixture
def store(moto_settings: Settings, monkeypatch: pytest.MonkeyPatch) -> str:
    # The waits between boto3's own tries, too.
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    return use(moto_settings, monkeypatch)


@pytest.fixture
def proxy(store: str, moto_settings: Settings, monkeypatch: pytest.MonkeyPatch) -> Iterator[Network]:  # noqa: ARG001  (its settings)
    with network(moto_settings["AWS_ENDPOINT_URL"], []) as between:
        monkeypatch.setenv("AWS_ENDPOINT_URL", between.url)
        yield between


@pytest.fixture
def request_(tmp_path: Path, store: str, monkeypatch: pytest.MonkeyPatch) -> QualifyRelease:
    monkeypatch.setenv("VLLM_QUALIFY_ENGINE", str(write_engine(tmp_path / "engine")))
    return QualifyRelease(recipe=str(write_bench_recipe(1, tmp_path / "recipe.yaml")), store=store)


@pytest.fixture(autouse=True)
def _at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tries are those of the product; the waits between them are not."""
    for module, name in ((tasks.measure, "keep_stage"), (tasks.decide, "publish")):
        monkeypatch.setattr(module, name, at_once(getattr(module, name)))
    monkeypatch.setattr("flows.qualify.publish", tasks.decide.publish)


def at_once(task: Task[..., Any]) -> Any:
    return task.with_options(retry_delay_seconds=0)


def when(of: Any, name: str, does: Callable[[], None]) -> AbstractContextManager[Any]:
    """Within the block something happens as soon as this function was called, and before it returns."""
    work = getattr(of, name)

    def called(*arguments: Any, **named: Any) -> Any:
        answer = work(*arguments, **named)
        does()
        return answer

    return patch.object(of, name, called)


def the_run() -> Run:
    (folder,) = runs_folder().iterdir()
    return Run(folder=folder)


def assert_published(published: Published, store: str) -> None:
    opened = open_store(store)
    (key,) = (key for key in opened.keys("reports/") if key.endswith("/manifest.json"))
    manifest = read_manifest(opened, key)
    assert (manifest.run_id, manifest.outcome) == (published.run.id, "passed")
    for named in manifest.objects:
        assert len(opened.get(named.key)) == named.size


def test_a_run_whose_store_is_away_publishes_all_when_it_is_back(proxy: Network, request_: QualifyRelease, store: str) -> None:
    with passing(), when(smoke, "measure_smoke", proxy.away.set), when(tasks.decide, "judge_run", proxy.away.clear):
        (published,) = run_qualification(request_)
    assert proxy.refused > 10, "each stage was tried more than once"
    assert {each.taken_from for each in published.run.stages()} == {None}
    assert_published(published, store)


def test_a_store_that_stays_away_ends_with_one_error_that_says_how_to_publish_later(
    proxy: Network, request_: QualifyRelease, store: str
) -> None:
    with passing(), when(smoke, "measure_smoke", proxy.away.set), pytest.raises(StoreError) as raised:
        run_qualification(request_)
    run = the_run()
    assert f"publish: {run.id} could not be published: the bucket {BUCKET}" in str(raised.value)
    message = re.search(r"vllm-qualify (publish \S+ --store \S+)$", raised.value.remedy)
    assert message, raised.value.remedy
    assert message[1] == f"publish {run.id} --store {store}"
    report = (run.folder / "report.json").read_bytes()

    proxy.away.clear()
    done = CliRunner().invoke(app, message[1].split(), catch_exceptions=False)
    assert done.exit_code == 0, done.output
    assert (run.folder / "report.json").read_bytes() == report
    assert_published(Published(outcome="passed", passed=True, run=run, page="", manifest=""), store)
    again = CliRunner().invoke(app, message[1].split(), catch_exceptions=False)
    assert again.exit_code == 0


def breaks(*_: object) -> None:
    raise HostError("the machine lost its power", "give it some", "load")


def test_a_rerun_looks_into_the_folders_of_this_machine_first(proxy: Network, request_: QualifyRelease, store: str) -> None:
    """The store had gone when accuracy was measured, and the run was broken off after that."""

    with passing():
        with (
            when(lm_eval_process, "prepare_task", proxy.away.set),
            patch.object(client, "measure_load", breaks),
            pytest.raises(HostError, match="lost its power"),
        ):
            run_qualification(request_)
        broken = the_run()
        proxy.away.clear()
        assert list(open_store(store).keys("stages/accuracy/")) == []
        with patch.object(lm_eval_process, "prepare_task", breaks):
            (published,) = run_qualification(request_)
    taken_from = {each.stage: each.taken_from for each in published.run.stages()}
    assert (taken_from["smoke"], taken_from["accuracy"], taken_from["load"]) == (broken.id, broken.id, None)
    assert_published(published, store)
    # Another machine could take it over too: the store has now what it lacked.
    (kept,) = open_store(store).keys("stages/accuracy/")
    assert kept.endswith(f"{published.run.id}.json")


@pytest.mark.usefixtures("proxy")
def test_a_run_that_was_not_judged_is_not_published(request_: QualifyRelease) -> None:
    with passing(), patch.object(client, "measure_load", breaks), pytest.raises(HostError):
        run_qualification(request_)
    run = the_run()
    with pytest.raises(CallerError, match=f"run {run.id} has not been judged") as raised:
        CliRunner().invoke(app, ["publish", run.id], catch_exceptions=False)
    assert f"vllm-qualify rejudge {run.id}" in raised.value.remedy


@pytest.mark.usefixtures("proxy")
def test_no_stage_takes_less_than_no_time_where_the_clock_is_set_back(
    request_: QualifyRelease, monkeypatch: pytest.MonkeyPatch
) -> None:
    class SetBack(datetime):
        said = 0

        @classmethod
        def now(cls, tz: Any = None) -> datetime:  # type: ignore[override]
            cls.said += 1
            return datetime.now(tz) - timedelta(hours=2 * (cls.said - 1))

    monkeypatch.setattr(tasks.measure, "datetime", SetBack)
    monkeypatch.setattr("vllm_qualify.evidence.stages.serve.datetime", SetBack)
    with passing():
        (published,) = run_qualification(request_)
    serve = published.run.stage("serve")
    assert serve is not None
    assert 0 < serve.duration_s < 600
    assert abs(serve.started_at - datetime.now(UTC)) < timedelta(hours=1)
