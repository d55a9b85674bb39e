"""Whether the server of the evidence is the plan's: its config file and its log."""

import shutil
from pathlib import Path

import pytest

from tests.builders.comparisons import DRAFTED, cell_plan
from tests.builders.served_models import captured, plan_of
from vllm_qualify.engine.server import Part, ServerPlan, config_text
from vllm_qualify.evidence.as_planned import beside_otherwise, drafted_otherwise, served_otherwise

COMMIT = "0123456789abcdef0123456789abcdef01234567"
SNAPSHOT = f"models--org--name/snapshots/{COMMIT}"


def left_by(server: ServerPlan, folder: Path) -> Path:
    """What a server leaves in its folder, on a port of its own; its config file."""
    folder.mkdir(parents=True)
    (folder / "server.log").write_text(captured())
    (folder / "server.yaml").write_text(config_text(server, 41234))
    return folder / "server.yaml"


@pytest.fixture
def evidence(tmp_path: Path) -> Path:
    left_by(plan_of(), tmp_path / "serve")
    return tmp_path


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": "/models/other"}, "its server had another model than the plan"),
        ({"arguments": {"max-model-len": 7}}, "its server had another max-model-len than the plan"),
        ({"arguments": {"trust-remote-code": True}}, "its server had another trust-remote-code than the plan"),
        ({"model": "org/name", "revision": COMMIT}, "its server had another model, revision, tokenizer-revision than the plan"),
    ],
)
def test_another_plan_is_reported(evidence: Path, changes: dict[str, object], message: str) -> None:
    assert served_otherwise(plan_of(**changes), evidence, taken_over=False) == message


def test_each_further_start_was_of_the_plans_server_too(evidence: Path) -> None:
    """A host that measured another server in a later start is found out by that start's own files."""
    later = evidence / "starts" / "2" / "serve"
    shutil.copytree(evidence / "serve", later)
    assert served_otherwise(plan_of(), evidence, taken_over=False) == ""
    (later / "server.yaml").write_text(config_text(plan_of(arguments={"max-model-len": 7}), 41234))
    assert served_otherwise(plan_of(), evidence, taken_over=False) == "its server had another max-model-len than the plan"
    (later / "server.yaml").unlink()
    assert "left no usable file" in served_otherwise(plan_of(), evidence, taken_over=False)


def test_the_server_beside_was_the_baselines_in_each_start(tmp_path: Path) -> None:
    """A slower one would make any release no slower."""
    plan = cell_plan([], server=plan_of(), beside=plan_of())
    first, later = (left_by(plan_of(), tmp_path / at / "load" / "beside") for at in (".", "starts/2"))
    assert beside_otherwise(plan, tmp_path, taken_over=False) == ""
    for config in (first, later):
        config.write_text(config_text(plan_of(arguments={"max-num-seqs": 1}), 41234))
        assert beside_otherwise(plan, tmp_path, taken_over=False).startswith("beside it, its server had another")
        config.write_text(config_text(plan_of(), 41234))
    first.unlink()
    assert "left no usable file" in beside_otherwise(plan, tmp_path, taken_over=False)
    assert beside_otherwise(plan.model_copy(update={"beside": None}), tmp_path, taken_over=False) == ""


def test_the_server_without_drafts_beside_was_the_plans(tmp_path: Path) -> None:
    plan = cell_plan([], server=plan_of(arguments=DRAFTED), undrafted=plan_of())
    config = left_by(plan_of(), tmp_path / "speculation" / "undrafted")
    assert drafted_otherwise(plan, tmp_path, taken_over=False) == ""
    config.write_text(config_text(plan_of(arguments={"max-num-seqs": 1}), 41234))
    assert drafted_otherwise(plan, tmp_path, taken_over=False).startswith("without speculation, its server had another")


def test_servers_that_were_started_in_turn_were_the_plans_too(tmp_path: Path) -> None:
    """The drafting server is measured in starts of its own, which no other check of the evidence sees."""
    drafting, plain = plan_of(arguments=DRAFTED), plan_of()
    plan = cell_plan([], server=drafting, undrafted=plain, undrafted_in_turn=True)
    folders = [tmp_path / "speculation" / f"start-{number}" for number in (1, 2, 3)]
    _, second, third = (left_by(server, folder) for server, folder in zip((drafting, plain, drafting), folders, strict=True))
    assert drafted_otherwise(plan, tmp_path, taken_over=False) == ""
    for number, config, server in ((2, second, plan_of(arguments={"enforce-eager": True})), (3, third, plain)):
        kept = config.read_text()
        config.write_text(config_text(server, 41234))
        assert f"start {number} of speculation: its server had another" in drafted_otherwise(plan, tmp_path, taken_over=False)
        config.write_text(kept)
    third.unlink()
    assert "left no usable file" in drafted_otherwise(plan, tmp_path, taken_over=False)
    assert drafted_otherwise(plan.model_copy(update={"undrafted_in_turn": False}), tmp_path, taken_over=False) == ""


def test_what_was_taken_over_may_have_another_path_and_nothing_else(evidence: Path) -> None:
    assert served_otherwise(plan_of(model="/elsewhere"), evidence, taken_over=True) == ""
    other = plan_of(model="/elsewhere", arguments={"dtype": "auto"})
    assert served_otherwise(other, evidence, taken_over=True) == "its server had another dtype than the plan"
    assert "another model" in served_otherwise(plan_of(model="org/name", revision=COMMIT), evidence, taken_over=True)


@pytest.mark.parametrize(
    ("folder", "message"),
    [(f"/another/hosts/hub/{SNAPSHOT}", ""), (f"/hub/{SNAPSHOT[:-1]}8", "its model is"), (f"/hub/x{SNAPSHOT}", "its model is")],
)
def test_the_cache_of_another_host_is_a_cache(evidence: Path, folder: str, message: str) -> None:
    plan = plan_of(model="org/name", revision=COMMIT, parts=[Part(option="model", name="org/name", revision=COMMIT)])
    (evidence / "serve" / "server.yaml").write_text(config_text(plan, 8000))
    log = captured().replace("/models/tiny", folder).replace("revision=None", f"revision={COMMIT}")
    (evidence / "serve" / "server.log").write_text(log)
    problem = served_otherwise(plan, evidence, taken_over=False)
    assert (message in problem, bool(problem)) == (True, bool(message))


@pytest.mark.parametrize("content", [None, b"[]", b"a: [", b"a: &a [*a]", b"\xff\xfe\x00", b""])
def test_a_file_that_says_nothing_is_no_proof(evidence: Path, content: bytes | None) -> None:
    (evidence / "serve" / "server.log").write_text("INFO: ready\n")
    assert "did not say in its log what it serves" in served_otherwise(plan_of(), evidence, taken_over=False)
    config = evidence / "serve" / "server.yaml"
    config.unlink()
    if content is not None:
        config.write_bytes(content)
    assert "its server left no usable file" in served_otherwise(plan_of(), evidence, taken_over=False)
