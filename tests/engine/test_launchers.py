"""What launchers have in common. A process really runs here; Docker's own part runs in tests/live/test_docker.py."""

from pathlib import Path
from typing import get_args

import pytest

from tests.builders.server_plans import IMAGE, PROCESS, plan
from vllm_qualify.engine.containers.run import RunningContainer
from vllm_qualify.engine.failure.end import End
from vllm_qualify.engine.launchers import ImageLauncherName, LauncherName
from vllm_qualify.engine.launchers.registry import LAUNCHERS, launcher_of
from vllm_qualify.engine.process import Leftover, Running, RunningProcess
from vllm_qualify.engine.provision import left_behind
from vllm_qualify.engine.server import MODEL_INSIDE, Client, Engine, ServerPlan, Starting, error_of
from vllm_qualify.errors import CallerError, HostError, QualifyError, ReleaseError

CLIENT = Client(program="vllm", python="python3", url="http://127.0.0.1:8123", model="org/model")


def test_each_name_has_its_launcher() -> None:
    assert set(get_args(LauncherName)) == set(LAUNCHERS)
    assert set(get_args(ImageLauncherName)) == {name for name, launcher in LAUNCHERS.items() if launcher.from_image}


@pytest.mark.parametrize(
    ("engine", "place", "host"),
    [
        (IMAGE, MODEL_INSIDE, "0.0.0.0"),
        (IMAGE.model_copy(update={"tag": None}), MODEL_INSIDE, "0.0.0.0"),
        (PROCESS, "/models/tiny", "127.0.0.1"),
    ],
    ids=["image", "digest alone", "process"],
)
def test_a_stored_plan_finds_its_launcher_again(engine: Engine, place: str, host: str) -> None:
    stored = plan(engine=engine, model="/models/tiny", revision=None)
    read_back = ServerPlan.model_validate_json(stored.model_dump_json())
    assert read_back == stored
    assert launcher_of(read_back.engine) is LAUNCHERS[engine.launcher]
    assert (read_back.served_model(8123).model, read_back.served_model(8123).host) == (place, host)


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
    process = RunningProcess(guard_pid=1, state_file=tmp_path / "s", log=tmp_path / "l")
    starting = Starting(url=CLIENT.url, process=process, command=[], client=CLIENT, launched_at=0.0)
    with pytest.raises(CallerError, match="no client of another image"):
        LAUNCHERS["process"].client_in(IMAGE, plan(), starting, tmp_path, {})


def test_what_a_killed_run_left_is_removed_and_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    leftovers = [Leftover(id=name, name=name, run=run) for name, run in (("a", "1"), ("b", ""))]
    monkeypatch.setattr("vllm_qualify.engine.launchers.docker.remove_leftovers", lambda: leftovers)
    assert left_behind("docker") == ["removed a, which run 1 had left behind", "removed b, which run unknown had left behind"]
    assert left_behind("process") == []


@pytest.mark.parametrize("launcher", ["process", "docker"])
def test_a_broken_package_is_told_to_who_can_mend_it_where_it_runs(tmp_path: Path, launcher: str) -> None:
    log, state = tmp_path / "server.log", tmp_path / "server.state"
    log.write_text("ImportError: libcudart.so.13: cannot open shared object file: No such file or directory\n")
    cases: dict[str, tuple[Running, type[QualifyError]]] = {
        "process": (RunningProcess(state_file=state, log=log, guard_pid=0), HostError),
        "docker": (RunningContainer(state_file=state, log=log, container_id="0123"), ReleaseError),
    }
    process, error = cases[launcher]
    failure = error_of(process, End(exit_code=1))
    assert (type(failure), failure.kind) == (error, "broken-installation")
