"""What a run leaves when it fails: its evidence, and a page about the failure."""

from collections.abc import Iterator
from contextlib import contextmanager

from jinja2 import TemplateError

from vllm_qualify.errors import QualifyError, StoreError
from vllm_qualify.report.failure import render_failure, run_failure
from vllm_qualify.runs.folder import Run, write_text
from vllm_qualify.runs.home import default_store_url, runs_folder
from vllm_qualify.runs.publishing import Published


@contextmanager
def keeping_evidence(runs: list[Run]) -> Iterator[None]:
    """Add notes to an error of the block: where each run without a report has its evidence. Each gets a page about it."""
    try:
        yield
    except QualifyError as error:
        failed = [run for run in runs if not (run.folder / "report.json").exists()]
        for run in failed:
            error.add_note(_save_failure(run, error, [other.id for other in failed if other != run]))
            error.add_note(f"evidence so far: {run.evidence}")
            if run.stages():
                error.add_note(f"to judge and publish it: vllm-qualify rejudge {run.id}")
        raise


@contextmanager
def publishing(runs: list[Run], store_url: str) -> Iterator[list[Published]]:
    """Within the block the runs are published, and each is then put into the list. All have a report.

    Raises StoreError if the store did not take one of them. It names those that are left, and how they are published later.
    """
    published: list[Published] = []
    try:
        yield published
    except StoreError as error:
        done = {each.run.id for each in published}
        left = [run.id for run in runs if run.id not in done]
        elsewhere = "" if store_url == default_store_url() else f" --store {store_url}"
        commands = " && ".join(f"vllm-qualify publish {run_id}{elsewhere}" for run_id in left)
        later = f"when the store is back, publish it from this machine: {commands}"
        remedy = f"{error.remedy}; what was measured and judged is in {runs_folder()}: {later}"
        raise StoreError(f"{', '.join(left)} could not be published: {error.problem}", remedy, "publish") from error


def _save_failure(run: Run, error: QualifyError, ended_with: list[str]) -> str:
    """Write the page. Returns where it is, or why there is none: no problem with it may hide the error itself."""
    page = run.folder / "failure.html"
    try:
        failure = run_failure(error, run.plan, run.folder, [stage.stage for stage in run.stages()], ended_with)
        write_text(run.folder / "failure.json", failure.model_dump_json(indent=2))
        write_text(page, render_failure(failure))
    except (QualifyError, OSError, ValueError, TemplateError) as problem:
        return f"no page about it could be written: {problem}"
    return f"page about it: {page}"
