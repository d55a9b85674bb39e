"""Make a copy of a model that computes the same with keys and values of another scale: an FP8 KV cache is then badly scaled.

Keys are multiplied and queries divided by the factor, values multiplied and what reads them divided. With a power of two this
is exact in BF16, so that nothing changes unless keys and values are rounded on their way, as in a cache of 8 bits.

.venv-engine/bin/python infra/reference_model/rescale.py vllm_qualify/catalog/reference/model FOLDER --factor 0.0078125
"""

import argparse
import shutil
from pathlib import Path

from safetensors.torch import load_file, save_file

MULTIPLIED, DIVIDED = ("k_proj.weight", "v_proj.weight"), ("q_proj.weight", "o_proj.weight")


def rescale(good: Path, other: Path, factor: float) -> None:
    shutil.copytree(good, other, dirs_exist_ok=True)
    weights = load_file(good / "model.safetensors")
    for name, tensor in weights.items():
        if name.endswith(MULTIPLIED):
            weights[name] = tensor * factor
        elif name.endswith(DIVIDED):
            weights[name] = tensor / factor
    save_file(weights, other / "model.safetensors", metadata={"format": "pt"})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("good", type=Path)
    parser.add_argument("other", type=Path)
    parser.add_argument("--factor", type=float, required=True)
    args = parser.parse_args()
    rescale(args.good, args.other, args.factor)


if __name__ == "__main__":
    main()
