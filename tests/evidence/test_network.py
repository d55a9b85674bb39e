"""The network between nodes. The lines between nodes are made here, in NCCL's form of them (its src/transport/net.cc and
init.cc); those within a node are in a captured log."""

from pathlib import Path

import pytest

from tests.report.builder import passed_report
from vllm_qualify.evidence.measurement import Measurement
from vllm_qualify.evidence.network import infiniband
from vllm_qualify.evidence.stages.stage import MACHINE
from vllm_qualify.evidence.stages.table import parse
from vllm_qualify.recipe.gates import gate_of

HEAD = "node-0:4242:4301 [0] NCCL INFO "


def channel(transport: str, number: int = 0, direction: str = "send") -> str:
    return f"{HEAD}Channel {number:02}/0 : 3[3] -> 11[3] [{direction}] via {transport}"


def local(transport: str = "P2P/CUMEM") -> str:
    return f"{HEAD}Channel 00/0 : 0[0] -> 1[1] via {transport}"


USES_IB = f"{HEAD}NET/IB : Using [0]mlx5_0:1/IB [RO]; OOB eth0:192.0.2.7<0>\n{HEAD}Using network IB"
USES_SOCKETS = f"{HEAD}NET/Socket : Using [0]eth0:192.0.2.7<0>\n{HEAD}Using network Socket"
OF_ONE_HOST = (Path(__file__).parent / "captured/network/two-h200.log").read_text()


def both(transport: str) -> list[str]:
    return [channel(transport, direction="receive"), channel(transport)]


@pytest.mark.parametrize(
    ("lines", "channels"),
    [
        ([USES_IB, *both("NET/IB/0/GDRDMA")], 2),
        ([USES_IB, *both("NET/IB/0")], 2),
        ([USES_IB, local(), *both("NET/IB/3/GDRDMA"), local("SHM/direct/direct")], 2),
        # by another rank's network card; over PCI; with shared buffers
        (both("NET/IB/0(8)/GDRDMA"), 2),
        (both("NET/IB/0/GDRDMA(PCI)/Shared"), 2),
        # NVIDIA's plug-ins
        (both("NET/IBext/0/GDRDMA"), 2),
        (both("NET/IBext_v8/0"), 2),
        # what switches reduce on the way has lines of its own, beside those of the channels
        ([*both("NET/IB/0/GDRDMA"), f"{HEAD}CollNet 00/0 : 3 [send] via COLLNET/SHARP/0/GDRDMA"], 2),
        # older versions have bus numbers in place of devices, or no connection's number
        ([f"{HEAD}Channel 00/0 : 7[b8000] -> 8[1b000] [send] via NET/IB/1/GDRDMA"], 1),
        ([f"{HEAD}Channel 00 : 7[b8000] -> 8[1b000] [receive] via NET/IB/1"], 1),
        # as vLLM's workers and Ray put words of their own before each line
        ([f"(Worker_TP3 pid=4242) {channel('NET/IB/0/GDRDMA')}"], 1),
        ([f"\x1b[36m(RayWorkerWrapper pid=7, ip=192.0.2.8)\x1b[0m {channel('NET/IB/0/GDRDMA')}"], 1),
    ],
)
def test_channels_over_infiniband_hold(lines: list[str], channels: int) -> None:
    for end in ("\n", "\r\n"):
        row = infiniband(end.join(["INFO 11-20 starting", *lines, "INFO ready"]), "serve/server.log")
        assert (row.value, row.sample_count, row.source) == (1.0, channels, "serve/server.log")


@pytest.mark.parametrize(
    "lines",
    [
        [USES_SOCKETS, *both("NET/Socket/0")],
        # found, and then not used
        [USES_IB, *both("NET/Socket/0")],
        [*both("NET/IB/0/GDRDMA"), channel("NET/Socket/0", 1)],
        [channel("NET/Socket/0", 1), *both("NET/IB/0/GDRDMA")],
        both("NET/AWS Libfabric/0/GDRDMA"),
        both("NET/FasTrak/0"),
        both("NET/IBsomething/0"),
    ],
)
def test_one_channel_over_another_network_is_enough_to_fail(lines: list[str]) -> None:
    assert infiniband("\n".join(lines), "serve/server.log").value == 0.0


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([], "the log has no NCCL channel"),
        (["INFO 11-20 serving, NET/IB/0/GDRDMA was mentioned"], "the log has no NCCL channel"),
        ([USES_IB], "the log has no NCCL channel"),
        ([USES_SOCKETS], "the log has no NCCL channel"),
        ([f"{HEAD}Channel 00/0 : 3[3] -> 11[3] [send] vi"], "the log has no NCCL channel"),
        ([f"{HEAD}CollNet 00/0 : 3 [send] via COLLNET/SHARP/0/GDRDMA"], "the log has no NCCL channel"),
        ([USES_IB, local(), local("SHM/direct/direct")], "none of NCCL's 2 channels goes between nodes: P2P/CUMEM, SHM/direct"),
        ([OF_ONE_HOST], "none of NCCL's 48 channels goes between nodes: P2P/CUMEM"),
    ],
)
def test_a_log_without_channels_between_nodes_tells_nothing(lines: list[str], message: str) -> None:
    row = infiniband("\n".join(lines), "serve/server.log")
    assert row.value is None
    assert message in (row.invalid_because or "")


# --- as a stage


def measured(folder: Path, log: str | None, gated: bool = True) -> list[Measurement]:
    """What the serve stage measured, with this log; the plan asks for InfiniBand or not."""
    plan = passed_report().plan
    gate = gate_of(metric="nccl_infiniband", minimum=1.0, unit="bool")
    plan = plan.model_copy(update={"gates": [*plan.gates, *([gate] if gated else [])]})
    (folder / "serve").mkdir(parents=True)
    (folder / "serve" / MACHINE).write_text(plan.fingerprint.model_dump_json())
    (folder / "serve" / "startup_s").write_text("12.5")
    if log is not None:
        (folder / "serve" / "server.log").write_text(log)
    return parse("serve", plan, folder)


@pytest.mark.parametrize(
    ("log", "value"), [(channel("NET/IB/0/GDRDMA"), 1.0), (channel("NET/Socket/0"), 0.0), ("", None), (None, None)]
)
def test_a_plan_that_asks_for_infiniband_measures_it(tmp_path: Path, log: str | None, value: float | None) -> None:
    startup, row = measured(tmp_path / "gated", log)
    assert (startup.metric, startup.value) == ("startup_s", 12.5)
    assert (row.metric, row.value, row.unit) == ("nccl_infiniband", value, "bool")
    assert row.fingerprint == startup.fingerprint != ""
    assert [each.metric for each in measured(tmp_path / "not gated", log, gated=False)] == ["startup_s"]
