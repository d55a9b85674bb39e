"""A host whose clock is wrong is told before it measures, and its dates are not believed. A clock that jumps does no harm."""

import json
import subprocess
import sys
from collections.abc import Callable, Mapping
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from infra.bench.passing import write_engine
from tests.approval.builder import CELL, NOW, approved, made_key, publish_report
from tests.builders.captured_runs import store_in
from tests.faults import jump_driver
from tests.faults.clock import clock, environment, jumping
from tests.publish.conftest import moto_settings, moto_url, no_outer_settings, radosgw_url
from tests.qualified import COMMAND
from tests.recipes import small, write
from tests.s3 import BUCKET
from vllm_qualify.approval.errors import FutureError
from vllm_qualify.approval.layout import approval_key
from vllm_qualify.approval.verify import Verified, verify, verify_file
from vllm_qualify.errors import HostError
from vllm_qualify.evidence.load.problems import ClientUse
from vllm_qualify.evidence.watched import read_watched, watched_problems
from vllm_qualify.publish import store as stores
from vllm_qualify.publish.store import checked_now
from vllm_qualify.publish.stores import open_store

__all__ = ["moto_settings", "moto_url", "no_outer_settings", "radosgw_url"]

WRONG_CLOCK = r"clock: this machine's clock is \d+ s (ahead of|behind) that of the store"


def ended(home: Path, said: Mapping[str, str], *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [COMMAND, *arguments],
        env=environment(said, {"VLLM_QUALIFY_HOME": str(home)}),
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


@pytest.mark.parametrize(("said", "message"), [("+2h", "7200 s ahead of"), ("-90s", "90 s behind"), ("+61s", "61 s ahead of")])
def test_a_wrong_clock_is_reported_before_anything_is_started(said: str, message: str, tmp_path: Path, home: Path) -> None:
    recipe = write(small(tmp_path), tmp_path / "mine.yaml")
    engine = {"VLLM_QUALIFY_ENGINE": str(write_engine(tmp_path / "engine"))}
    done = ended(home, {**clock(said), **engine}, "run", str(recipe))
    assert done.returncode == 3, done.stdout + done.stderr
    assert f"error (the operator must act): clock: this machine's clock is {message} that of the store file://" in done.stderr
    assert done.stderr.count("error (") == 1
    assert "remedy: set the clock of this machine" in done.stderr
    assert not list(home.glob("runs/*"))
    assert not list(home.glob("store/reports/*"))


def checked(store: str, said: str) -> subprocess.CompletedProcess[str]:
    """The store's check under such a clock."""
    command = [sys.executable, "-c", f"from vllm_qualify.publish.stores import open_store; open_store({store!r}).check()"]
    return subprocess.run(command, env=environment(clock(said)), capture_output=True, text=True, check=False)


def test_half_a_minute_is_no_fault(tmp_path: Path) -> None:
    url = (tmp_path / "store").as_uri()
    for said in ("+30s", "-30s"):
        assert checked(url, said).returncode == 0


class Wrong(datetime):
    """A clock that is ahead by AHEAD."""

    AHEAD = timedelta()

    @classmethod
    def now(cls, tz: object = None) -> datetime:  # type: ignore[override]
        assert tz is UTC
        return datetime.now(UTC) + cls.AHEAD


@pytest.mark.parametrize("server", ["moto", pytest.param("radosgw", marks=pytest.mark.s3)])
@pytest.mark.parametrize("minutes", [-120, -2, 2, 120])
def test_the_clock_of_an_s3_store_is_that_of_its_answers(
    server: str, minutes: int, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = open_store(request.getfixturevalue(f"{server}_url"))
    assert abs(checked_now(store) - store.now()) < timedelta(seconds=10)
    monkeypatch.setattr(Wrong, "AHEAD", timedelta(minutes=minutes))
    monkeypatch.setattr(stores, "datetime", Wrong)
    with pytest.raises(HostError, match=WRONG_CLOCK):
        store.check()


@pytest.mark.s3
@pytest.mark.parametrize("said", ["+2h", "-2h"])
@pytest.mark.usefixtures("radosgw_url")
def test_an_s3_store_that_takes_no_request_of_such_a_clock_is_reported_alike(said: str) -> None:
    """The signature of a request is dated, and a server refuses one of another quarter of an hour."""
    done = checked(f"s3://{BUCKET}/clock", said)
    assert "HostError: clock: this machine's clock is 7" in done.stderr, done.stderr


@pytest.mark.thorough
def test_a_decision_is_not_dated_by_a_wrong_clock(tmp_path: Path, home: Path) -> None:
    store = store_in(tmp_path / "store")
    run = publish_report(store, tmp_path / "runs")
    done = ended(home, clock("+2h"), "reject", run.run_id, "--by", "Bob", "--reason", "no", "--store", store.url)
    assert done.returncode == 3
    assert "this machine's clock is 7200 s ahead of that of the store" in done.stderr
    assert not list(store.keys("approvals/"))


def test_an_approval_of_the_future_does_not_hold(tmp_path: Path) -> None:
    store, key = store_in(tmp_path / "store"), made_key(tmp_path / "key.pem")
    run = publish_report(store, tmp_path / "runs")
    approved(store, run, key, now=NOW + timedelta(hours=2))
    file = tmp_path / "approval.json"
    file.write_bytes(store.get(approval_key(CELL, run.run_id)))
    looks: list[Callable[[datetime], Verified]] = [
        lambda now: verify(store, CELL, [key.public_key], now),
        lambda now: verify_file(file, [key.public_key], now),
    ]
    for look in looks:
        with pytest.raises(FutureError, match="it is dated 2026-03-14 14:30:00 UTC, 7200 s from now") as raised:
            look(NOW)
        assert raised.value.exit_code == 16
        assert "compare this machine's clock with others" in raised.value.remedy
        assert look(NOW + timedelta(hours=2, seconds=-59)).run_id == run.run_id


@pytest.mark.thorough
def test_verify_itself_says_so(tmp_path: Path, home: Path) -> None:
    store, key = store_in(tmp_path / "store"), made_key(tmp_path / "key.pem")
    approved(store, publish_report(store, tmp_path / "runs"), key, now=datetime.now(UTC) + timedelta(hours=2))
    done = ended(home, {}, "verify", CELL, "--store", store.url, "--public-key", f"{tmp_path}/key.pem.pub", "--json")
    assert done.returncode == 16, done.stderr
    assert "it is dated" in done.stderr
    assert not done.stdout or json.loads(done.stdout)


JUMP_S = 7200


@pytest.mark.parametrize("jump", [f"+{JUMP_S}", f"-{JUMP_S}"])
def test_both_halves_of_a_load_were_watched(jump: str, tmp_path: Path) -> None:
    """The clock is set in the middle: no half is unwatched, and nothing takes less than no time."""
    load_s, said = 2 * jump_driver.HALF_S, tmp_path / "clock"
    said.write_text("+0")
    command = [sys.executable, jump_driver.__file__, "watch", str(tmp_path), str(said), jump]
    subprocess.run(command, env=environment(jumping(said)), check=True, timeout=120)
    use = ClientUse.model_validate_json((tmp_path / "client-1.json").read_bytes())
    (first, _), (last, _) = use.cpu_s[0], use.cpu_s[-1]
    # On a busy machine both take longer than the load, and far less than the jump.
    assert 0 < last - first < JUMP_S / 2, "the jump is in the client's own times"
    host = read_watched(tmp_path).host
    times = [sample.time for sample in host]
    assert times == sorted(times)
    assert times[-1] - times[0] < JUMP_S / 2, "the jump is in the host's times"
    of_each_half = [sum(begin <= time <= begin + load_s / 2 for time in times) for begin in (last - load_s, last - load_s / 2)]
    assert min(of_each_half) >= 3, of_each_half
    assert watched_problems(tmp_path, last - load_s, last) == []
    assert use.cores(last - load_s, last) is not None
