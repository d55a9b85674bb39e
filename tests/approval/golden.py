"""An approval as one version of the statement makes it, kept for all later ones by `python -m tests.approval.golden FOLDER`."""

import json
import sys
from datetime import date
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from tests.approval.builder import CELL, approved, made_key, of_plan, publish_report, waiver, with_gate
from tests.builders.changed import changed
from tests.report.builder import image_report
from vllm_qualify.approval.statement import STATEMENT_VERSION
from vllm_qualify.approval.verify import export
from vllm_qualify.publish.directory import DirectoryStore
from vllm_qualify.report.model import Report
from vllm_qualify.runs import publishing


def of_an_image(report: Report) -> Report:
    """Of an image, with a waived gate."""
    report, under_test = with_gate("fail", waiver(date(2026, 5, 1)))(report), image_report().plan
    report = of_plan("cell", release=under_test.cell.release)(report)
    server = changed(under_test.server, parts=report.plan.server.parts)
    return of_plan(server=server, client=under_test.client, client_image=under_test.client_image)(report)


def make(folder: Path, target: Path) -> None:
    store = DirectoryStore(folder / "store")
    run = publish_report(store, folder / "runs", change=of_an_image)
    approved(store, run, made_key(folder / "key"))
    export(store, CELL, folder / "bundle")
    bundle = DirectoryStore(folder / "bundle")
    objects = {key: bundle.get(key).decode() for key in bundle.keys("")}
    (target / f"version-{STATEMENT_VERSION}.json").write_text(json.dumps(objects, indent=1) + "\n")
    (target / f"version-{STATEMENT_VERSION}.pub").write_bytes((folder / "key.pub").read_bytes())


if __name__ == "__main__":
    with TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(publishing, "render_page", lambda *_: "<!doctype html><title>A page</title>\n")
        Path(folder, "store").mkdir()
        make(Path(folder), Path(sys.argv[1]))
