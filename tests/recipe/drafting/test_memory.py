"""How many GPUs a server needs: reckoned by hand for models of known sizes."""

from pathlib import Path

import pytest

from tests.builders.families import NAMES, make_family, read_family
from vllm_qualify.recipe.drafting.memory import fit_server
from vllm_qualify.recipe.drafting.model_files import read_model_files
from vllm_qualify.recipe.drafting.shape import Shape, describe_shape
from vllm_qualify.recipe.drafting.traffic import Traffic
from vllm_qualify.recipe.gpu_types import MEMORY_GB

TRAFFIC = Traffic(1024, 256, 64)
WRITING = [name for name in NAMES if "refused" not in read_family(name)["expected"]]


def shape_of(name: str, folder: Path) -> tuple[Shape, int | None]:
    files = read_model_files(make_family(name, folder), name)
    return describe_shape(files), files.weights_bytes


@pytest.mark.parametrize("name", WRITING)
def test_each_family_needs_the_gpus_that_a_person_reckons(name: str, tmp_path: Path) -> None:
    shape, weights = shape_of(name, tmp_path)
    expected = {
        gpu: read_family(name)["expected"][gpu] for gpu in ("h100", "h200", "b200") if gpu in read_family(name)["expected"]
    }
    assert {gpu: fit_server(shape, weights, MEMORY_GB[gpu], TRAFFIC).gpus for gpu in expected} == expected


def test_more_clients_need_more_gpus_and_the_context_is_what_fits(tmp_path: Path) -> None:
    shape, weights = shape_of("llama-3.1", tmp_path)
    # 16.06 GB of weights; 131,072 bytes of cache for a token: 32 layers, 8 heads of 128 numbers of 2 bytes, twice.
    assert shape.cache_bytes(1) == 131_072
    one = fit_server(shape, weights, 80, TRAFFIC)
    assert (one.gpus, one.context_tok, round(one.cache_gb, 2)) == (1, 131_072, 10.74)
    assert fit_server(shape, weights, 80, TRAFFIC._replace(clients=512)).gpus == 2
    # Of 24 GB, 17.6 are for both: 1.54 GB are 11,734 tokens of cache.
    small = fit_server(shape, weights, 24, TRAFFIC._replace(clients=4))
    assert (small.gpus, small.context_tok) == (1, 8192)


def test_gpus_divide_the_heads(tmp_path: Path) -> None:
    shape, _ = shape_of("smollm2", tmp_path)
    assert shape.heads == 9
    assert fit_server(shape, 300 * 10**9, 80, TRAFFIC).gpus is None
    assert fit_server(shape._replace(heads=16), 300 * 10**9, 80, TRAFFIC).gpus == 8


def test_a_cache_with_fewer_heads_than_gpus_is_kept_several_times(tmp_path: Path) -> None:
    shape, _ = shape_of("qwen3-next", tmp_path)
    assert shape.kv_heads == 2
    alone = fit_server(shape, None, 80, TRAFFIC)
    wide = fit_server(shape, 400 * 10**9, 80, TRAFFIC)
    assert (alone.gpus, wide.gpus, round(wide.cache_gb / alone.cache_gb)) == (1, 8, 4)
