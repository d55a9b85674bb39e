"""The orchestrator's bench: its cells go the product's own way to the store, and its figures can be read."""

import json
from pathlib import Path

import pytest

from infra.bench.orchestrator import figures, measure, table
from vllm_qualify.publish.bundle import read_manifest
from vllm_qualify.publish.stores import open_store


@pytest.mark.prefect
def test_two_cells_pass_and_are_published(tmp_path: Path) -> None:
    """What they cost is for a quiet machine to say."""
    cost = measure(2, tmp_path)
    assert (cost.cells, cost.passed) == (2, 2)
    store = open_store((tmp_path / "home" / "store").as_uri())
    manifests = [read_manifest(store, key) for key in store.keys("reports/") if key.endswith("/manifest.json")]
    assert sorted(manifest.cell for manifest in manifests) == [f"orchestrator/bf16/cpu/p{number}" for number in (1, 2)]
    assert {manifest.outcome for manifest in manifests} == {"passed"}
    message = json.loads(json.dumps(figures([cost])))
    assert message.keys() == {"seconds_per_cell", "mib_per_cell"}
    assert all(each.keys() == {"2"} for each in message.values())
    assert len(list(table([cost]))) == 2
