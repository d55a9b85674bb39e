"""`infra.bench.paths`: a fault that nothing could miss is refused by its path, and a healthy release is not."""

import pytest

from infra.bench.paths import FAULTS, HEALTHY, NOISE_BF16, NOISE_FP8, Planted, Release, is_refused


def test_a_fault_of_every_cached_block_is_refused_and_no_healthy_release(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("infra.bench.paths.PROMISED", ("chat",))
    assert is_refused(Release(Planted("corrupt block", 1, ("path_cached",)), NOISE_BF16, seed=1))
    assert not is_refused(Release(HEALTHY, NOISE_FP8, seed=2))


def test_each_fault_of_the_bench_is_one_of_a_path() -> None:
    assert {path for planted in FAULTS for path in planted.paths} == set(HEALTHY.paths)


def test_the_noise_is_what_was_measured_on_a_gpu() -> None:
    """Of all likelihoods 61 and 48 in a hundred were the same in two passes."""
    for weights, same in ((NOISE_BF16, 0.61), (NOISE_FP8, 0.48)):
        assert sum(weights) == pytest.approx(1, abs=0.01)
        assert weights[0] == pytest.approx(same, abs=0.01)
