"""What launchers have in common. A process really runs here; Docker's own part runs in tests/live/test_docker.py."""

import json
from pathlib import Path
from typing import Any, get_args

import pytest

from vllm_qualify.engine.image import EngineImage
from vllm_qualify.engine.launchers import ImageLauncherName, LauncherName
from vllm_qualify.engine.launchers.registry import LAUNCHERS, launcher_of
from vllm_qualify.engine.process import Leftover, RunningProcess
from vllm_qualify.engine.provision import left_behind
from vllm_qualify.engine.server import Client, ServerPlan, Starting
from vllm_qualify.errors import CallerError

IMAGE = {"launcher": "docker", "repository": "vllm/vllm-openai", "tag": "v0.32.0", "platform": "linux/amd64"}
STORED = {
    "engine": IMAGE | {"digest": "sha256:" + "0" * 64},
    "model": "/models/tiny",
    "revision": None,
    "served_model_name": "tiny",
    "arguments": {},
    "environment": {},
    "startup_timeout_s": 60,
}
CLIENT = Client(program="vllm", python="python3", url="http://127.0.0.1:8123", model="org/model")


def test_each_name_has_its_launcher() -> None:
    assert set(get_args(LauncherName)) == set(LAUNCHERS)
    assert set(get_args(ImageLauncherName)) == {name for name, launcher in LAUNCHERS.items() if launcher.from_image}


@pytest.mark.parametrize(
    ("engine", "place", "host"),
    [
        (STORED["engine"], "/vllm-qualify/model", "0.0.0.0"),
        ({"launcher": "process", "python": "/engine/bin/python"}, "/models/tiny", "127.0.0.1"),
    ],
)
def test_a_stored_plan_finds_its_launcher_again(engine: dict[str, Any], place: str, host: str) -> None:
    plan = ServerPlan.model_validate_json(json.dumps(STORED | {"engine": engine}))
    assert launcher_of(plan.engine) is LAUNCHERS[engine["launcher"]]
    assert plan.model_dump(mode="json")["engine"] == engine
    assert (plan.served_model(8123).model, plan.served_model(8123).host) == (place, host)


def test_a_client_of_this_machine_shares_its_letter_box_alone(tmp_path: Path) -> None:
    (tmp_path / "prompts.jsonl").write_text("{}")
    launcher = launcher_of(CLIENT)
    with launcher.letter_box(CLIENT) as box:
        launcher.put(CLIENT, f"{box}/order.json", b"{}", "load")
        assert [path.name for path in Path(box).iterdir()] == ["order.json"]
        assert launcher.give(CLIENT, tmp_path / "prompts.jsonl", box, "load") == f"{box}/given-prompts.jsonl"
        assert launcher.results_folder(CLIENT, box) == box
    assert not Path(box).exists()
    assert launcher.typed_command(CLIENT, ["vllm", "bench"]) == ["vllm", "bench"]


def test_the_command_of_a_client_in_a_container_is_shown_with_its_container() -> None:
    client = CLIENT.model_copy(update={"launcher": "docker", "runs_in": "0123456789abcdef"})
    assert launcher_of(client).typed_command(client, ["vllm", "bench"]) == ["docker", "exec", "0123456789ab", "vllm", "bench"]


def test_a_process_takes_no_client_of_another_image(tmp_path: Path) -> None:
    plan = ServerPlan.model_validate(STORED)
    assert isinstance(plan.engine, EngineImage)
    process = RunningProcess(guard_pid=1, state_file=tmp_path / "s", log=tmp_path / "l")
    starting = Starting(url=CLIENT.url, process=process, command=[], client=CLIENT, launched_at=0.0)
    with pytest.raises(CallerError, match="no client of another image"):
        LAUNCHERS["process"].client_in(plan.engine, plan, starting, tmp_path, {})


def test_what_a_killed_run_left_is_removed_and_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    leftovers = [Leftover(id=name, name=name, run=run, cell="", state="running") for name, run in (("a", "1"), ("b", ""))]
    monkeypatch.setattr("vllm_qualify.engine.launchers.docker.remove_leftovers", lambda: leftovers)
    assert left_behind("docker") == ["removed a, which run 1 had left behind", "removed b, which run unknown had left behind"]
    assert left_behind("process") == []
