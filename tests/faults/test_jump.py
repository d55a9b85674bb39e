"""A machine's clock is set in the middle of a load: no half of it is unwatched, and nothing takes less than no time."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.faults import jump_driver
from tests.faults.clock import environment, jumping
from vllm_qualify.evidence.load.problems import ClientUse
from vllm_qualify.evidence.watched import read_watched, watched_problems

LOAD_S = 2 * jump_driver.HALF_S


@pytest.mark.parametrize("jump", ["+7200", "-7200"])
def test_both_halves_of_a_load_were_watched(jump: str, tmp_path: Path) -> None:
    said = tmp_path / "clock"
    said.write_text("+0")
    command = [sys.executable, jump_driver.__file__, "watch", str(tmp_path), str(said), jump]
    subprocess.run(command, env=environment(jumping(said)), check=True, timeout=120)
    use = ClientUse.model_validate_json((tmp_path / "client-1.json").read_bytes())
    (first, _), (last, _) = use.cpu_s[0], use.cpu_s[-1]
    assert 0 < last - first < 2 * LOAD_S, "the jump is in the client's own times"
    host = read_watched(tmp_path).host
    times = [sample.time for sample in host]
    assert times == sorted(times)
    assert times[-1] - times[0] < 2 * LOAD_S
    of_each_half = [sum(begin <= time <= begin + LOAD_S / 2 for time in times) for begin in (last - LOAD_S, last - LOAD_S / 2)]
    assert min(of_each_half) >= 3, of_each_half
    assert watched_problems(tmp_path, last - LOAD_S, last) == []
    assert use.cores(last - LOAD_S, last) is not None
