"""`recipe bounds` as a user types it: after a whole run, on its own recipe and on others."""

import json
from pathlib import Path

import pytest
from ruamel.yaml import YAML
from typer.testing import CliRunner, Result

from flows.qualify import run_qualification
from infra.bench.passing import passing
from tests.builders.flows import request_
from vllm_qualify.cli.commands import app
from vllm_qualify.errors import CallerError
from vllm_qualify.recipe.loading import load_recipe
from vllm_qualify.runs.request import QualifyRelease

__all__ = ["request_"]

pytestmark = [pytest.mark.prefect, pytest.mark.usefixtures("on_prefect")]


def ended(request: QualifyRelease) -> str:
    with passing():
        (published,) = run_qualification(request)
    return published.run.id


def bounds(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["recipe", "bounds", *arguments])


def refused(*arguments: str) -> CallerError:
    done = bounds(*arguments)
    assert isinstance(done.exception, CallerError), done.output
    return done.exception


def without_gates(recipe: Path) -> None:
    """Of the profile; those of the recipe stay."""
    yaml = YAML()
    document = yaml.load(recipe)
    del document["gpu_types"]["cpu"]["profiles"]["p1"]["gates"]
    yaml.dump(document, recipe)


def test_a_runs_bounds_are_shown_and_written_into_its_own_recipe_alone(request_: QualifyRelease, tmp_path: Path) -> None:
    recipe = Path(request_.recipe)
    without_gates(recipe)
    recipe.write_text(f"# Mine.\n{recipe.read_text()}")
    run_id, text = ended(request_), recipe.read_text()

    shown = bounds(run_id, "--recipe", str(recipe))
    assert shown.exit_code == 0, shown.output
    assert "+ output_throughput_tok_s" in shown.stdout
    assert "--loss-that-hurts" in shown.stdout
    assert recipe.read_text() == text
    document = json.loads(bounds(run_id, "--json", "--loss-that-hurts", "0.05").stdout)
    by_label = {bound["label"]: bound for bound in document["bounds"]}
    throughput = by_label["output_throughput_tok_s"]
    assert throughput["gate"]["minimum"] < throughput["interval"]["lower"] - throughput["visible"] * (1 - 1e-9)
    kept = by_label["exact_match (gsm8k, strict-match)"]
    assert (kept["state"], kept["own"]["minimum"]) == ("kept", 0.75)
    assert by_label["exact_match (gsm8k, strict-match) against the baseline"]["price"]["answers"] > 0

    # Not into the catalog, into another recipe, or on a metric that was not measured.
    assert "the catalog" in str(refused(run_id, "--recipe", "reference", "--write"))
    assert "--recipe FILE" in str(refused(run_id, "--write"))
    other = tmp_path / "other.yaml"
    other.write_text(text.replace("max-num-seqs: 1", "max-num-seqs: 2"))
    assert "was not made with this recipe: server options" in str(refused(run_id, "--recipe", str(other), "--write"))
    assert "no bound on 'speed'" in str(refused(run_id, "--recipe", str(recipe), "--metric", "speed"))

    written = bounds(run_id, "--recipe", str(recipe), "--write")
    assert written.exit_code == 0, written.output
    assert "- {metric: output_throughput_tok_s, minimum: " in written.stderr
    assert recipe.read_text().startswith("# Mine.\n")
    gates = load_recipe(str(recipe)).recipe.gpu_types["cpu"].profiles["p1"].gates
    assert "output_throughput_tok_s" in [gate.metric for gate in gates]

    assert f"judge the run by it: vllm-qualify rejudge {run_id}" in written.stderr

    # The run passes them, and a second time there is nothing to write.
    again = CliRunner().invoke(app, ["rejudge", run_id, "--recipe", str(recipe), "--store", request_.store])
    assert again.exit_code == 0, again.output
    assert "nothing to write" in bounds(run_id, "--recipe", str(recipe), "--write").stderr

    # For a gate against a baseline this run may have measured too little.
    compared = bounds(run_id, "--recipe", str(recipe), "--write", "--loss-that-hurts", "0.4")
    assert "max_loss: 0.4" in compared.stderr
    assert f"make a baseline for it: vllm-qualify run {recipe} --establish-baseline" in compared.stderr
