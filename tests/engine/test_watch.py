"""Watching: what real pages, processes and NVML tell is written, and what cannot be read is a line that says so."""

import json
import os
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pynvml
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.builders import processes
from tests.builders.gpus import CAPTURED as CAPTURED_GPU
from tests.builders.gpus import Nvml
from tests.releases import service
from vllm_qualify.engine import watch
from vllm_qualify.engine.confinement import quiet_environment
from vllm_qualify.engine.kinds.vllm import KIND as VLLM_KIND
from vllm_qualify.engine.process import running_guarded
from vllm_qualify.engine.watch import HOST_SAMPLES, SCRAPES, GpuSample, HostSample, Roots, Scrape
from vllm_qualify.recipe.tables import known_versions, table_of

until = partial(processes.until, limit_s=30)
CLOCKS = json.loads((CAPTURED_GPU / "nvml-clocks.json").read_text())
FAMILIES = frozenset(watch.kept_metrics(VLLM_KIND, "0.32.0").values())
CAPTURED = Path(__file__).parents[1] / "evidence" / "captured"
# Lines of the page of a real vLLM 0.32.0 on the CPU, of each kind that there is.
PAGE = """\
# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="reference"} 16.0
# TYPE vllm:num_requests_waiting_by_reason gauge
vllm:num_requests_waiting_by_reason{engine="0",model_name="reference",reason="capacity"} 0.0
# TYPE vllm:kv_cache_usage_perc gauge
vllm:kv_cache_usage_perc{engine="0",model_name="reference"} 0.009770992366412212
# TYPE vllm:num_preemptions_total counter
vllm:num_preemptions_total{engine="0",model_name="reference"} 0.0
# TYPE vllm:num_preemptions_created gauge
vllm:num_preemptions_created{engine="0",model_name="reference"} 1.795221315690415e+09
# TYPE vllm:request_success_total counter
vllm:request_success_total{engine="0",finished_reason="stop",model_name="reference"} 0.0
vllm:request_success_total{engine="0",finished_reason="length",model_name="reference"} 257.0
# TYPE vllm:request_num_preemptions histogram
vllm:request_num_preemptions_bucket{engine="0",le="1.0",model_name="reference"} 0.0
vllm:request_num_preemptions_bucket{engine="0",le="+Inf",model_name="reference"} 0.0
vllm:request_num_preemptions_count{engine="0",model_name="reference"} 0.0
vllm:request_num_preemptions_sum{engine="0",model_name="reference"} 0.0
"""
ONE = '{engine="0",model_name="reference"}'
COUNTERS = {
    f"vllm:num_requests_running{ONE}": 16.0,
    f"vllm:kv_cache_usage_perc{ONE}": 0.009770992366412212,
    f"vllm:num_preemptions_total{ONE}": 0.0,
    'vllm:request_success_total{engine="0",finished_reason="stop",model_name="reference"}': 0.0,
    'vllm:request_success_total{engine="0",finished_reason="length",model_name="reference"}': 257.0,
}
# Like a server, whose work is done by a child of its own.
BUSY = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'while True: sum(range(10_000))'])"


@pytest.mark.parametrize("version", known_versions())
def test_every_version_of_the_catalog_has_all_that_is_wanted(version: str) -> None:
    names = watch.kept_metrics(VLLM_KIND, version)
    assert names.keys() == VLLM_KIND.counters.keys()
    assert set(names.values()) <= set(table_of(version).metrics)


def test_a_version_with_an_old_name_and_without_another(monkeypatch: pytest.MonkeyPatch) -> None:
    real = table_of("0.32.0")
    others = [name for name in real.metrics if name not in ("vllm:kv_cache_usage_perc", "vllm:spec_decode_num_drafts")]
    changed = real.model_copy(update={"metrics": [*others, "vllm:gpu_cache_usage_perc"]})

    monkeypatch.setattr(watch, "table_of", lambda _: changed)
    names = watch.kept_metrics(VLLM_KIND, "0.32.0")
    assert names["kv_cache_usage"] == "vllm:gpu_cache_usage_perc"
    assert VLLM_KIND.counters.keys() - names.keys() == {"drafts"}


def test_gauges_and_counters_of_a_real_page_are_kept_and_nothing_of_histograms() -> None:
    assert watch.parse_metrics(PAGE, FAMILIES | {"vllm:request_num_preemptions"}) == COUNTERS
    assert {watch.family_of(key) for key in COUNTERS} <= FAMILIES


@pytest.mark.parametrize("name", ["load/metrics-2-after.txt", "speculation/batch1/drafted/metrics-1-after.txt"])
def test_a_page_of_a_real_server_says_the_same_as_to_a_parser_of_all_its_lines(name: str) -> None:
    page = (CAPTURED / name).read_text()
    samples = [sample for family in text_string_to_metric_families(page) for sample in family.samples]
    wanted = [sample for sample in samples if sample.name.removesuffix("_total") in FAMILIES]
    assert len(wanted) > 5
    assert sorted(watch.parse_metrics(page, FAMILIES).values()) == sorted(sample.value for sample in wanted)


def test_what_is_no_number_is_left_out() -> None:
    assert watch.parse_metrics("# TYPE vllm:kv_cache_usage_perc gauge\nvllm:kv_cache_usage_perc NaN\n", FAMILIES) == {}


@contextmanager
def serving(status: int = 200, text: str = PAGE, delay_s: float = 0.0) -> Iterator[str]:
    def answer(_: service.Asked) -> service.Answer:
        time.sleep(delay_s)  # as a server that is held up takes a question up late
        return service.Answer(status, text.encode())

    with service.serving(answer) as page:
        yield f"http://{page.address}/metrics"


@contextmanager
def hanging() -> Iterator[str]:
    """It takes the connection, and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"http://127.0.0.1:{server.getsockname()[1]}/metrics"


@contextmanager
def gone() -> Iterator[str]:
    with serving() as url:
        pass
    yield url


def lines(path: Path) -> list[str]:
    return path.read_text().splitlines() if path.exists() else []


@contextmanager
def watching(url: str, folder: Path, roots: Mapping[str, Roots] | None = None) -> Iterator[None]:
    with watch.watching_machine(folder, roots or {}, (), 0.05), watch.watching_server(url, FAMILIES, folder, 0.05):
        yield


def watched(url: str, folder: Path, count: int = 3, **others: Any) -> tuple[list[Scrape], list[HostSample]]:
    """What `watching` wrote until there were so many lines of both."""
    began = time.time()
    with watching(url, folder, **others):
        assert until(lambda: min(len(lines(folder / name)) for name in (SCRAPES, HOST_SAMPLES)) >= count)
    scrapes = [Scrape.model_validate_json(line) for line in lines(folder / SCRAPES)]
    host = [HostSample.model_validate_json(line) for line in lines(folder / HOST_SAMPLES)]
    times = [*(one.time for one in scrapes), *(one.time for one in host)]
    assert all(began <= each <= time.time() for each in times)
    assert not any(thread.name == "watch" for thread in threading.enumerate())
    return scrapes, host


def test_a_run_is_sampled(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", ""]) as ended:
        ended.wait()
    roots: dict[str, Roots] = {"server": lambda: [os.getpid()], "none yet": lambda: (), "ended": lambda: [ended.pid]}
    with serving() as url:
        scrapes, host = watched(url, tmp_path, roots=roots)
    assert [one.values for one in scrapes] == [COUNTERS] * len(scrapes)
    assert host[0].cpu_share is None
    assert all(one.cpu_share is not None and 0 <= one.cpu_share <= 1 for one in host[1:])
    mine = host[-1].processes["server"]
    assert mine is not None
    assert mine.cpu_s > 0
    assert mine.rss_mib > 10
    assert (host[-1].processes["none yet"], host[-1].gpus) == (None, [])
    assert [one.processes["ended"] for one in host] == [None] * len(host)


@pytest.mark.parametrize(
    ("server", "message"),
    [
        (partial(serving, 500, "broken"), "500 Internal Server Error"),
        (partial(serving, 200, "<html> {"), "ValueError"),
        (gone, "ConnectError"),
        (hanging, "ReadTimeout"),
    ],
    ids=["broken", "no page", "gone", "hanging"],
)
def test_a_page_that_cannot_be_read_is_a_line_that_says_so(
    server: Callable[[], AbstractContextManager[str]], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server that hangs holds up neither the block nor its end."""
    monkeypatch.setattr(watch, "SCRAPE_TIMEOUT_S", 1.0)
    with server() as url:
        scrapes, _ = watched(url, tmp_path, 2)
    assert all(message in str(one.error) and one.values == {} for one in scrapes)


def test_a_scrape_has_the_time_of_its_answer() -> None:
    """A server that was held up tells how it is when it answers, not how it was when it was asked."""
    asked_at = time.time()
    with serving(delay_s=0.5) as url:
        assert watch.scrape_metrics(url, FAMILIES).time >= asked_at + 0.5


def test_an_error_of_the_block_is_its_own_and_ends_the_thread(tmp_path: Path) -> None:
    with serving() as url, pytest.raises(KeyError), watching(url, tmp_path):
        raise KeyError
    assert not any(thread.name == "watch" for thread in threading.enumerate())


def test_a_folder_that_cannot_be_written_does_not_stop_the_run(tmp_path: Path) -> None:
    with serving() as url, watching(url, tmp_path / "not there"):
        assert until(lambda: not any(thread.name == "watch" for thread in threading.enumerate()))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.thorough
def test_a_killed_run_keeps_its_lines(tmp_path: Path) -> None:
    with serving() as url:
        run = textwrap.dedent(f"""
            import threading
            from pathlib import Path
            from vllm_qualify.engine.watch import watching_server
            with watching_server({url!r}, {sorted(FAMILIES)!r}, Path({str(tmp_path)!r}), every_s=0.05):
                threading.Event().wait()
        """)
        with subprocess.Popen([sys.executable, "-c", run]) as process:
            assert until(lambda: len(lines(tmp_path / SCRAPES)) >= 2)
            process.send_signal(signal.SIGKILL)
    assert [Scrape.model_validate_json(line).values for line in lines(tmp_path / SCRAPES)[:2]] == [COUNTERS] * 2


def cpu_s(host: list[HostSample], name: str) -> list[float]:
    return [sample.cpu_s for one in host if (sample := one.processes[name]) is not None]


@pytest.mark.thorough
def test_a_guarded_process_is_found_by_its_guard(tmp_path: Path) -> None:
    command = [sys.executable, "-c", BUSY]
    with serving() as url, running_guarded(command, quiet_environment(), tmp_path / "log", grace_s=0.5) as process:
        children = psutil.Process(process.guard_pid).children
        assert until(lambda: any(each.cpu_times().user > 1 for each in children(recursive=True)))
        _, host = watched(url, tmp_path, roots={"server": process.processes})
    used_s = cpu_s(host, "server")
    # Start-up and the guard itself take less: this is the grandchild's.
    assert used_s[0] > 1
    assert used_s == sorted(used_s)


# As /proc has it of two containers, the first with a server, its worker, and what `docker exec` started.
PROCESSES = {
    1: ("0::/init.scope", "PPid:\t0\nNSpid:\t1"),
    500: ("0::/system.slice/docker-aaaa.scope", "PPid:\t480\nNSpid:\t500\t1"),
    501: ("0::/system.slice/docker-aaaa.scope", "PPid:\t500\nNSpid:\t501\t7"),
    502: ("0::/system.slice/docker-aaaa.scope", "PPid:\t480\nNSpid:\t502\t31"),
    503: ("0::/system.slice/docker-aaaa.scope", "PPid:\t502\nNSpid:\t503\t32"),
    600: ("0::/system.slice/docker-bbbb.scope", "PPid:\t580\nNSpid:\t600\t1"),
}


def test_a_containers_server_is_its_first_process(monkeypatch: pytest.MonkeyPatch) -> None:
    def text(pid: int, name: str) -> str:
        return dict(zip(("cgroup", "status"), PROCESSES[pid], strict=True))[name]

    monkeypatch.setattr(watch, "_read_proc", text)
    monkeypatch.setattr(psutil, "pids", lambda: list(PROCESSES))
    assert [list(watch.first_in_container(name)) for name in ("aaaa", "bbbb", "cccc")] == [[500], [600], []]


IDLE = GpuSample(
    index=1,
    sm_mhz=345,
    memory_mhz=3201,
    clock_reasons=["gpu_idle"],
    memory_used_mib=615,
    power_w=102.284,
    temperature_c=37,
    utilization=0.0,
)
AS_LOADED = {"sm_mhz": 1425, "clock_reasons": ["sw_power_cap"], "memory_used_mib": 2265, "power_w": 694.268}
LOADED = IDLE.model_copy(update=AS_LOADED | {"temperature_c": 61, "utilization": 0.99})
UNSUPPORTED = dict.fromkeys(
    ("nvmlDeviceGetPowerUsage", "nvmlDeviceGetCurrentClocksThrottleReasons", "nvmlDeviceGetUtilizationRates"),
    pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED),
)
LOST = {"nvmlDeviceGetTemperature": pynvml.NVMLError(pynvml.NVML_ERROR_GPU_IS_LOST)}


def watched_machine(folder: Path, gpus: Sequence[int]) -> list[HostSample]:
    with watch.watching_machine(folder, {}, gpus, 0.05):
        assert until(lambda: len(lines(folder / HOST_SAMPLES)) >= 2)
    assert [path.name for path in folder.iterdir()] == [HOST_SAMPLES]
    return [HostSample.model_validate_json(line) for line in lines(folder / HOST_SAMPLES)]


@pytest.mark.parametrize(
    ("when", "changes", "expected"),
    [
        ("idle", {}, IDLE),
        ("busy", {}, LOADED),
        ("idle", UNSUPPORTED, IDLE.model_copy(update={"power_w": None, "clock_reasons": None, "utilization": None})),
        ("busy", LOST, GpuSample(index=1, error="GPU is lost")),
    ],
    ids=["idle", "busy", "does not tell all", "lost"],
)
def test_what_a_real_gpu_reported_and_did_not_tell(
    when: str, changes: dict[str, object], expected: GpuSample, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nvml = Nvml(monkeypatch, [CLOCKS[when] | changes] * 2)
    host = watched_machine(tmp_path, [1])
    assert [one.gpus for one in host] == [[expected]] * len(host)
    assert not nvml.is_open


def test_a_server_that_hangs_holds_up_no_sample_of_the_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch, "SCRAPE_TIMEOUT_S", 2.0)
    with hanging() as url, watching(url, tmp_path):
        assert until(lambda: len(lines(tmp_path / HOST_SAMPLES)) >= 5)
        assert lines(tmp_path / SCRAPES) == []


def test_a_machine_without_nvml_says_so_of_each_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_DRIVER_NOT_LOADED)

    monkeypatch.setattr(pynvml, "nvmlInit", fail)
    assert watched_machine(tmp_path, [0, 3])[0].gpus == [GpuSample(index=index, error="Driver Not Loaded") for index in (0, 3)]


def test_clock_reasons_in_words() -> None:
    """The bits as nvml.h has them."""
    assert watch.reason_names(0) == []
    assert watch.reason_names(0x8 | 0x40) == ["hw_slowdown", "hw_thermal_slowdown"]
    assert watch.reason_names(0x20 | 0x4) == ["sw_thermal_slowdown", "sw_power_cap"]
    assert watch.reason_names(0x80 | 0x1000) == ["hw_power_brake_slowdown", "0x1000"]
