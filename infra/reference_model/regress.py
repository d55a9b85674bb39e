"""Make a worse copy of a model by rounding its weights coarsely, as a careless quantization would.

.venv-engine/bin/python infra/reference_model/regress.py vllm_qualify/catalog/reference/{model,regressed}
"""

import argparse
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

# Steps from zero to each matrix's largest weight, which becomes 3 of them; chosen by trials (README.md has the scores).
LEVELS = 3.4


def round_coarsely(weights: torch.Tensor, levels: float) -> torch.Tensor:
    """Round to multiples of the largest weight divided by `levels`, one scale for the whole matrix. Vectors are not changed."""
    if weights.ndim < 2:
        return weights
    step = weights.float().abs().max() / levels
    return ((weights.float() / step).round() * step).to(weights.dtype)


def regress(good: Path, worse: Path, levels: float) -> None:
    worse.mkdir(parents=True, exist_ok=True)
    for path in good.iterdir():
        if path.suffix != ".safetensors":
            shutil.copyfile(path, worse / path.name)
    weights = {name: round_coarsely(tensor, levels) for name, tensor in load_file(good / "model.safetensors").items()}
    save_file(weights, worse / "model.safetensors", metadata={"format": "pt"})
    (worse / "model.safetensors").chmod(0o644)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("good", type=Path)
    parser.add_argument("worse", type=Path)
    parser.add_argument("--levels", type=float, default=LEVELS)
    args = parser.parse_args()
    regress(args.good, args.worse, args.levels)


if __name__ == "__main__":
    main()
