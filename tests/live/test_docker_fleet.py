"""From a tag pushed to a registry to an approval that deployments trust: every service is real, and a run is killed."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

import pytest

from deployments.setup import CONTROL
from tests.approver.running import Approver, approver_running
from tests.docker_engine import Engine, push_rebuilt
from tests.fleet import PrefectServer, Worker
from tests.fleet.runs import Runs
from tests.publish.conftest import use
from tests.publish.policies import let_work
from tests.qualified import share_answers
from tests.recipes import small, write
from tests.releases.service import Answer, Asked, serving
from tests.s3 import Settings, make_bucket, settings_in
from vllm_qualify.approval.pointer import read_pointer
from vllm_qualify.approval.published import read_run
from vllm_qualify.approval.signing import public_keys
from vllm_qualify.approval.verify import verify
from vllm_qualify.publish.stores import open_store
from vllm_qualify.report.model import Report

pytestmark = [pytest.mark.fleet, pytest.mark.docker, pytest.mark.engine, pytest.mark.s3]

ROOT = Path(__file__).parents[2]
CELL = "reference/bf16/cpu/balanced"
BUCKET = "fleet"
STORE = f"s3://{BUCKET}"
# A newer patch release than the image's own.
VERSION = "0.32.9"
MAKE_BLOCK = """
import sys
from prefect.blocks.notifications import CustomWebhookNotificationBlock
text = {"subject": "{{subject}}", "body": "{{body}}"}
CustomWebhookNotificationBlock(name="team", url=sys.argv[1], json_data=text).save("team")
"""


@dataclass
class Inbox:
    """The notifications that people would get: subjects with their texts."""

    url: str = ""
    messages: list[tuple[str, str]] = field(default_factory=list)

    def about(self, subject: str) -> list[str]:
        return [body for sent, body in self.messages if sent == f"vllm-qualify: {subject}"]


@pytest.fixture
def inbox() -> Iterator[Inbox]:
    box = Inbox()

    def receive(asked: Asked) -> Answer:
        given = json.loads(asked.body)
        box.messages.append((given["subject"], given["body"]))
        return Answer(204)

    with serving(receive) as service:
        box.url = f"http://{service.address}/"
        yield box


@dataclass(frozen=True)
class Fleet:
    runs: Runs
    control: Worker
    host: Worker
    recipe: str
    approver: Approver

    def watch(self, registry: str) -> None:
        request = {"recipes": [self.recipe], "gpu_types": ["cpu"], "repository": f"{registry}/vllm/vllm-openai", "store": STORE}
        ended = self.runs.run("watch-releases/watch", request)
        assert ended.is_completed(), f"{ended}\n{self.runs.last_lines()}"


@pytest.fixture
def fleet(
    fleet_server: PrefectServer,
    docker_engine: Engine,
    radosgw_settings: Settings,
    radosgw_directory: Path,
    inbox: Inbox,
    tmp_path: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Fleet]:
    """Made ready by the deployments' own command; its schedules are off, since the test says when.

    The workers have the rights of infra/terraform's policies watcher and publisher, and no key. The approver has all.
    """
    setup = os.environ | {"PREFECT_API_URL": fleet_server.url, "PREFECT_HOME": str(tmp_path / "setup")}
    for command in (["-c", MAKE_BLOCK, inbox.url], ["-m", "deployments.setup", "--notify", "custom-webhook/team"]):
        done = subprocess.run([sys.executable, *command], cwd=ROOT, env=setup, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
    make_bucket(radosgw_settings, BUCKET)
    publisher, watcher = (settings_in(radosgw_directory / f"env.{user}") for user in ("denied", "watching"))
    let_work(radosgw_settings, BUCKET, denied="publisher", watching="watcher")
    # As workers of one user do, they share a folder of Prefect.
    prefect = {"PREFECT_HOME": str(tmp_path / "workers")}
    common = {**docker_engine.settings, **prefect, "VLLM_QUALIFY_STORE": STORE}
    control_host = {**common, **watcher, "VLLM_QUALIFY_HOME": str(tmp_path / "control-home")}
    host = {**common, **publisher, "VLLM_QUALIFY_HOME": str(tmp_path / "host-home"), "VLLM_QUALIFY_LOCKS": str(tmp_path)}
    for home in (control_host["VLLM_QUALIFY_HOME"], host["VLLM_QUALIFY_HOME"]):
        Path(home).mkdir()
        share_answers(Path(home), tmp_path_factory)
    recipe = str(write(small(tmp_path), tmp_path / "mine.yaml"))
    with (
        Worker(tmp_path, fleet_server.url, CONTROL, CONTROL, **control_host) as control,
        Worker(tmp_path, fleet_server.url, "cpu", "host", **host) as gpu_host,
        approver_running(STORE, tmp_path / "approver", radosgw_settings) as approver,
    ):
        runs = Runs(fleet_server, control.log, gpu_host.log, limit_s=900)
        with runs.client() as client:
            for deployment in client.read_deployments():
                for schedule in client.read_deployment_schedules(deployment.id):
                    client.update_deployment_schedule(deployment.id, schedule.id, active=False)
        yield Fleet(runs, control, gpu_host, recipe, approver)


@pytest.mark.usefixtures("cpu_image")
@pytest.mark.timeout(1800)
def test_a_pushed_tag_becomes_an_approval_though_its_run_is_killed_on_the_way(
    fleet: Fleet, docker_engine: Engine, inbox: Inbox, radosgw_settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    use(radosgw_settings, monkeypatch)
    store, runs = open_store(STORE), fleet.runs
    # What was there before anybody watched is nothing new.
    fleet.watch(docker_engine.registry)
    since = datetime.now(UTC)
    digest = push_rebuilt(docker_engine.registry, "vllm/vllm-openai", "v0.32.0", VERSION)
    fleet.watch(docker_engine.registry)

    # Registry, event, automation, run.
    runs.wait_until(lambda: runs.of_flow("qualify-release", since), "the automation")
    (release,) = runs.of_flow("qualify-release", since)
    runs.wait_until(lambda: runs.of_flow("qualify-host", since), "the host's run")
    (cell,) = runs.of_flow("qualify-host", since)

    # The host's process is killed during the load.
    runs.wait_until(lambda: list(store.keys("stages/accuracy/")), "the answers to be kept")
    assert docker_engine.containers() != []
    fleet.host.kill_flow_runs()
    assert runs.ended(cell.id).name == "Crashed"
    runs.wait_until(lambda: inbox.about("infrastructure failure"), "people to be notified of it")
    runs.tend_until(lambda: runs.state(cell.id).name != "Crashed")

    # Verdict, report, approval pending.
    ended = runs.completed(cell.id)
    assert ended.name == "AwaitingDecision", f"{ended}\n{runs.last_lines()}"
    assert runs.ended(release.id).is_completed()
    assert docker_engine.containers() == []
    (manifest,) = (key for key in store.keys(f"reports/{CELL}/") if key.endswith("/manifest.json"))
    report = Report.model_validate_json(store.get(manifest.replace("manifest.json", "report.json")))
    assert report.plan.cell.release.engine.digest == digest
    taken = {stage.stage: stage.taken_from for stage in report.stages}
    assert taken["smoke"] == taken["accuracy"] != report.run_id
    assert taken["load"] is None
    runs.wait_until(lambda: inbox.about("waiting for a decision"), "people to be notified of it")
    (text,) = inbox.about("waiting for a decision")
    for expected in (CELL, f"{store.url}/reports/{CELL}/{report.run_id}/", f"/runs/flow-run/{cell.id}"):
        assert expected in text
    assert read_pointer(store, CELL) is None

    # Decision, pointer.
    sha256 = read_run(store, CELL, report.run_id).report_object.sha256
    form = {"decision": "approve", "reason": "it passed every gate", "report_sha256": sha256}
    decided = fleet.approver.decide(CELL, report.run_id, form, "Ada", fleet.approver.newcomer("Ada"))
    assert decided.status_code == 200, decided.text
    approved = verify(store, CELL, public_keys([fleet.approver.public_key]), datetime.now(UTC))
    assert approved.run_id == report.run_id
    assert {"sha256": digest.removeprefix("sha256:")} in [subject["digest"] for subject in approved.statement["subject"]]

    # Seen once, announced once.
    fleet.watch(docker_engine.registry)
    assert [run.id for run in runs.of_flow("qualify-release", since)] == [release.id]
