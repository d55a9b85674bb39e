"""The server's life, with a stand-in where a fault must be forced."""

import json
import os
import signal
import socket
from pathlib import Path

import pytest
import yaml

from tests.fakes.vllm import make_engine
from vllm_qualify.engine.environment import EngineEnvironment
from vllm_qualify.engine.running import Running
from vllm_qualify.engine.server import ServerPlan, config_text
from vllm_qualify.engine.start import serve
from vllm_qualify.errors import HostError, ReleaseError


def plan_for(folder: Path, behaviour: str, startup_timeout_s: float = 30) -> ServerPlan:
    engine = make_engine(folder / "engine")
    return ServerPlan(
        engine=EngineEnvironment(python=engine / "bin" / "python"),
        model="/models/tiny",
        revision=None,
        served_model_name="tiny",
        arguments={"max-model-len": 64},
        environment={"TORCH_FAKE_VLLM": behaviour},
        startup_timeout_s=startup_timeout_s,
    )


def kill_server(process: Running) -> None:
    os.killpg(json.loads(process.state_file.read_text())["pid"], signal.SIGKILL)
    while process.end() is None:
        pass


def silent(_line: str) -> None:
    pass


def test_a_healthy_server_serves_and_is_gone_after_the_block(tmp_path: Path) -> None:
    with serve(plan_for(tmp_path, "healthy"), tmp_path, silent) as server:
        assert server.startup_s > 0
        server.check_alive()
        port = int(server.url.rpartition(":")[2])
    assert server.process.end() is not None
    with socket.socket() as probe:
        assert probe.connect_ex(("127.0.0.1", port)) != 0


def test_a_server_that_dies_ends_the_stage_with_its_last_lines(tmp_path: Path) -> None:
    with pytest.raises(ReleaseError, match="exit code 1") as raised, serve(plan_for(tmp_path, "dies"), tmp_path, silent):
        pass
    assert raised.value.log_tail[-1] == "ValueError: the fake dies as ordered"


def test_a_server_that_hangs_ends_the_stage_with_its_last_lines(tmp_path: Path) -> None:
    plan = plan_for(tmp_path, "hangs", startup_timeout_s=2)
    with pytest.raises(ReleaseError, match="no completion came back within 2 s") as raised, serve(plan, tmp_path, silent):
        pass
    assert raised.value.log_tail[-1] == "loading weights for ever"


def test_a_server_whose_completions_fail_never_gets_ready(tmp_path: Path) -> None:
    plan = plan_for(tmp_path, "sick", startup_timeout_s=2)
    with pytest.raises(ReleaseError, match="no completion came back"), serve(plan, tmp_path, silent):
        pass


def test_a_server_that_died_unnoticed_in_the_block_is_noticed_at_its_end(tmp_path: Path) -> None:
    with pytest.raises(HostError, match="signal 9"), serve(plan_for(tmp_path, "healthy"), tmp_path, silent) as server:
        kill_server(server.process)


def test_a_port_in_use_is_reported_before_anything_starts(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with (
            pytest.raises(HostError, match=f"port {port} is in use"),
            serve(plan_for(tmp_path, "healthy"), tmp_path, silent, port),
        ):
            pass
    assert not (tmp_path / "server.log").exists()


def test_the_config_file_has_the_plan_and_nothing_secret(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_secret_secret")
    with serve(plan_for(tmp_path, "healthy"), tmp_path, silent):
        config = (tmp_path / "server.yaml").read_text()
    assert "max-model-len: 64" in config
    assert "host: 127.0.0.1" in config
    assert "hf_secret" not in config


@pytest.mark.parametrize("text", ["on", "off", "yes", "no", "y", "1e3", "0x10", "null", "~", "2026-11-20", "a: b", "- a"])
def test_text_in_the_config_file_is_text_to_vllm(tmp_path: Path, text: str) -> None:
    plan = plan_for(tmp_path, "healthy").model_copy(update={"arguments": {"option": text, "nested": {"inner": [text]}}})
    # as vLLM reads it
    read = yaml.safe_load(config_text(plan, 8000))
    assert (read["option"], json.loads(read["nested"])) == (text, {"inner": [text]})
