"""`infra.bench.paths`: a fault that nothing could miss is refused by its path, and a healthy release is not."""

from pathlib import Path

import pytest

from infra.bench.paths import FAULTS, HEALTHY, NOISE_BF16, NOISE_FP8, Planted, Release, Shown, compared_recipe, judge
from tests.recipes import write
from vllm_qualify.recipe.loading import load_recipe


def test_a_fault_of_every_cached_block_is_refused_and_no_healthy_release(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("infra.bench.paths.PROMISED", ("chat",))
    assert judge(Release(Planted("corrupt block", 1, ("path_cached",)), NOISE_BF16, seed=1)).is_refused
    assert judge(Release(HEALTHY, NOISE_FP8, seed=2)) == Shown(is_refused=False, is_unproven=False)


def test_a_path_that_nothing_proves_refuses_nothing() -> None:
    """As in a recipe that says nothing of paths."""
    without_cache = judge(Release(Planted("no cache", 1, ("path_cached",)), NOISE_BF16, seed=1))
    assert without_cache == Shown(is_refused=False, is_unproven=True)


def test_each_fault_of_the_bench_is_one_of_a_path() -> None:
    assert {path for planted in FAULTS for path in planted.paths} == set(HEALTHY.paths)


def test_the_noise_is_what_was_measured_on_a_gpu() -> None:
    """Of all likelihoods 61 and 48 in a hundred were the same in two passes."""
    for weights, same in ((NOISE_BF16, 0.61), (NOISE_FP8, 0.48)):
        assert sum(weights) == pytest.approx(1, abs=0.01)
        assert weights[0] == pytest.approx(same, abs=0.01)


def test_the_recipe_whose_servers_are_held_has_all_its_files(tmp_path: Path) -> None:
    loaded = load_recipe(str(write(compared_recipe(tmp_path), tmp_path / "recipe.yaml")))
    profiles = loaded.recipe.gpu_types["cpu"].profiles
    assert sorted(profiles) == ["chats", "traffic"]
    trace = profiles["traffic"].load.trace
    assert trace
    assert (tmp_path / trace).is_file()
