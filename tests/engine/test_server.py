"""The server's life, with a stand-in where a fault must be forced."""

import json
import os
import signal
import socket
from pathlib import Path

import pytest
import yaml

from tests.builders.fake_servers import plan_for, silent
from vllm_qualify.engine.process import Running
from vllm_qualify.engine.server import config_text
from vllm_qualify.engine.server_start import serve
from vllm_qualify.errors import HostError, RecipeError, ReleaseError, UnclearError


def kill_server(process: Running) -> None:
    os.killpg(json.loads(process.state_file.read_text())["pid"], signal.SIGKILL)
    while process.end() is None:
        pass


def test_a_healthy_server_serves_as_its_config_file_says_and_is_gone_after_the_block(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_secret_secret")
    with serve(plan_for(tmp_path, "healthy"), tmp_path, silent) as server:
        assert server.startup_s > 0
        server.check_alive()
        port = int(server.url.rpartition(":")[2])
    assert server.process.end() is not None
    with socket.socket() as probe:
        assert probe.connect_ex(("127.0.0.1", port)) != 0
    config = (tmp_path / "server.yaml").read_text()
    assert {"max-model-len: 64", "host: 127.0.0.1"} <= set(config.splitlines())
    assert "hf_secret" not in config


@pytest.mark.parametrize(
    ("behaviour", "limit_s", "message", "last_line"),
    [
        ("dies", 120, "exit code 1", "ValueError: the fake dies as ordered"),
        ("hangs", 2, "no completion came back within 2 s", "loading weights for ever"),
        ("sick", 2, "no completion came back", None),
    ],
)
def test_a_server_that_never_gets_ready_ends_the_stage_with_its_last_lines(
    tmp_path: Path, behaviour: str, limit_s: float, message: str, last_line: str | None
) -> None:
    plan = plan_for(tmp_path, behaviour, startup_timeout_s=limit_s)
    with pytest.raises((ReleaseError, UnclearError), match=message) as raised, serve(plan, tmp_path, silent):
        pass
    assert last_line in (None, raised.value.log_tail[-1])


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


def test_fields_by_names_with_dots_are_one_mapping_to_vllm(tmp_path: Path) -> None:
    """In a config file vLLM reads the next option as the value of such a name that is true (vllm-project/vllm#30919)."""
    arguments = {
        "compilation-config.pass_config.fuse_allreduce_rms": True,
        "compilation-config.pass_config.eliminate_noops": False,
        "compilation-config.max_cudagraph_capture_size": 2048,
        "compilation-config": '{"mode": 3}',
    }
    plan = plan_for(tmp_path, "healthy").model_copy(update={"arguments": arguments})
    read = yaml.safe_load(config_text(plan, 8000))
    assert [name for name in read if "." in name] == []
    assert json.loads(read["compilation-config"]) == {
        "mode": 3,
        "pass_config": {"fuse_allreduce_rms": True, "eliminate_noops": False},
        "max_cudagraph_capture_size": 2048,
    }


def test_no_field_is_lost_by_the_order_of_names(tmp_path: Path) -> None:
    planned, given = plan_for(tmp_path, "healthy"), {"o.a.b": 2, "o.a": {"c": 1}}
    for names in (("o.a.b", "o.a"), ("o.a", "o.a.b")):
        plan = planned.model_copy(update={"arguments": {name: given[name] for name in names}})
        assert json.loads(yaml.safe_load(config_text(plan, 8000))["o"]) == {"a": {"b": 2, "c": 1}}
    text = planned.model_copy(update={"arguments": {"hf-overrides.rope": '{"type": "yarn"}', "o.a": "b"}})
    read = yaml.safe_load(config_text(text, 8000))
    assert (json.loads(read["hf-overrides"]), json.loads(read["o"])) == ({"rope": {"type": "yarn"}}, {"a": "b"})


def test_a_field_beside_a_value_that_is_no_mapping_is_refused(tmp_path: Path) -> None:
    arguments = {"compilation-config": 3, "compilation-config.mode": 3}
    plan = plan_for(tmp_path, "healthy").model_copy(update={"arguments": arguments})
    with pytest.raises(RecipeError, match=r"compilation-config\.mode is given, and beside it 3"):
        config_text(plan, 8000)


@pytest.mark.parametrize("text", ["on", "off", "yes", "no", "y", "1e3", "0x10", "null", "~", "2026-11-20", "a: b", "- a"])
def test_text_in_the_config_file_is_text_to_vllm(tmp_path: Path, text: str) -> None:
    plan = plan_for(tmp_path, "healthy").model_copy(update={"arguments": {"option": text, "nested": {"inner": [text]}}})
    # as vLLM reads it
    read = yaml.safe_load(config_text(plan, 8000))
    assert (read["option"], json.loads(read["nested"])) == (text, {"inner": [text]})
