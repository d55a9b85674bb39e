"""Report which parameters of a model no tensor of its checkpoint gives, by the engine's own transformers. No weights are read.

A script for the Python of any vLLM from 0.12 on: it imports torch and transformers, and nothing of this project. Its first
argument is the question as JSON, `{"model": "…", "revision": "…" or null}`: a folder, or a repository in the hub's cache. It
writes one JSON object to the file that the second argument names, or else to its standard output:

    {"lacking": ["model.layers.1.mlp.up_proj.weight", …],
     "misshapen": [["model.norm.weight", [33], [32]], …],
     "unsure": "…" or null}

`misshapen` has each name with the shape that the files have and the one that the model has. `unsure` says why nothing could be
said. Code of a model is never run: a model that brings some is one of these.

transformers makes the model without memory for its weights, and loads tensors into it that have the shapes of the files'
headers and no content. It knows which tensors have other names in files, which are joined, tied or left out. vLLM loads by code
of its own, so what transformers misses counts only if the names are understood: if another layer has a tensor of this name, or,
outside of layers, if every tensor of the files has its place and no kind of tensor is missing from all layers. All else is
unsure.
"""

import importlib
import json
import logging
import os
import re
import resource
import sys
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

INDEX = "model.safetensors.index.json"
# Publishers leave these out where they are tied, whatever the configuration says; vLLM itself refuses what it cannot tie.
MAY_BE_TIED = ("lm_head.weight", "embed_tokens.weight", "embedding.weight", "wte.weight", "shared.weight", "score.weight")
EXPERT = re.compile(r"(?P<layer>.+\.experts)\.(?P<number>\d+)\.(?P<rest>.+)")
# A configuration from outside may ask for any number of layers.
MOST_BYTES = 16 * 2**30
MOST_NAMED = 20
LAYER = "#"
# Parameters have one of the first four types. Old checkpoints have the numbers of positions, too, and masks.
TYPES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16", "I64": "int64", "BOOL": "bool"}
# Where quantizers write what vLLM reads beside a configuration that does not say it.
QUANTIZED = ("hf_quant_config.json", "quantize_config.json", "quant_config.json")

Shape = list[int]
Answer = dict[str, Any]


class UnsureError(Exception):
    """Why nothing can be said."""


def main() -> None:
    question: dict[str, Any] = json.loads(sys.argv[1])
    logging.disable(logging.CRITICAL)
    # transformers prints while it loads; only the answer may reach the output.
    answer_to = os.open(sys.argv[2], os.O_WRONLY | os.O_CREAT) if len(sys.argv) > 2 else os.dup(1)
    os.dup2(2, 1)
    resource.setrlimit(resource.RLIMIT_DATA, (MOST_BYTES, MOST_BYTES))
    try:
        answer = answer_about(find_folder(question["model"], question["revision"]))
    except UnsureError as error:
        answer = make_answer(unsure=str(error))
    except Exception as error:  # whatever it is, it says nothing against the weights
        answer = make_answer(unsure=f"{type(error).__name__}: {error}"[:500])
    with os.fdopen(answer_to, "w") as out:
        json.dump(answer, out)


def make_answer(lacking: Iterable[str] = (), misshapen: Iterable[Any] = (), unsure: str | None = None) -> Answer:
    return {"lacking": sorted(lacking)[:MOST_NAMED], "misshapen": sorted(misshapen)[:MOST_NAMED], "unsure": unsure}


def find_folder(model: str, revision: str | None) -> Path:
    if revision is None:
        return Path(model)
    from huggingface_hub import snapshot_download

    return Path(snapshot_download(model, revision=revision, local_files_only=True))


def answer_about(folder: Path) -> Answer:
    config = read_mapping(folder / "config.json")
    if "auto_map" in config:
        raise UnsureError("the model brings code of its own")
    if is_quantized(config) or any((folder / name).is_file() for name in QUANTIZED):
        raise UnsureError("the weights are quantized: their tensors are not the model's parameters")
    tensors = read_tensors(folder)
    if others := sorted({kind for kind, _ in tensors.values()} - TYPES.keys()):
        raise UnsureError(f"there are tensors of the type {', '.join(others)}: perhaps the weights are quantized")
    try:
        loaded = load_without_memory(folder, config, tensors)
    except RuntimeError:
        if odd := odd_expert(tensors):
            return odd
        raise
    return judge(loaded, tensors)


def read_mapping(path: Path) -> dict[str, Any]:
    document = json.loads(path.read_bytes())
    if not isinstance(document, dict):
        raise UnsureError(f"{path.name} is no JSON object")
    return document


def is_quantized(config: Mapping[str, Any]) -> bool:
    """Whether it or a part of it, like the text model of one for pictures, is."""
    parts = [config, *(part for part in config.values() if isinstance(part, dict))]
    return any(part.get("quantization_config") or part.get("compression_config") for part in parts)


# --- the files


def read_tensors(folder: Path) -> dict[str, tuple[str, Shape]]:
    """The type and shape of each tensor, by its name, of the files that vLLM's usual loader reads."""
    files = {path.name: path for path in sorted(folder.glob("*.safetensors")) if not path.name.startswith(".")}
    if not files:
        raise UnsureError("there are no safetensors files")
    if any(name.startswith("consolidated") for name in files):
        raise UnsureError("there are weights in two forms, of which vLLM takes either")
    index = folder / INDEX
    named = set(read_mapping(index)["weight_map"].values()) if index.is_file() else set(files)
    tensors = {}
    for name in sorted(named):
        tensors.update(read_header(files[name]))
    return tensors


def read_header(path: Path) -> dict[str, tuple[str, Shape]]:
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(length))
    return {name: (about["dtype"], about["shape"]) for name, about in header.items() if name != "__metadata__"}


def odd_expert(tensors: Mapping[str, tuple[str, Shape]]) -> Answer | None:
    """The tensors that few experts of a layer lack or have in another shape than most of them; None if there are none.

    transformers 5 joins the experts of a layer, and says of experts that differ only that it could not. Where half of them
    differ, the model has experts of several kinds.
    """
    layers: dict[str, dict[str, dict[str, Shape]]] = {}
    for name, (_, shape) in tensors.items():
        if found := EXPERT.fullmatch(name):
            layers.setdefault(found["layer"], {}).setdefault(found["rest"], {})[found["number"]] = shape
    lacking, misshapen = [], []
    for layer, by_rest in layers.items():
        numbers = {number for shapes in by_rest.values() for number in shapes}
        for rest, shapes in by_rest.items():
            usual, alike = Counter(map(tuple, shapes.values())).most_common(1)[0]
            if 2 * alike <= len(numbers):
                return None
            lacking += [f"{layer}.{number}.{rest}" for number in numbers - shapes.keys()]
            misshapen += [
                [f"{layer}.{number}.{rest}", shape, list(usual)] for number, shape in shapes.items() if tuple(shape) != usual
            ]
    return make_answer(lacking, misshapen) if lacking or misshapen else None


# --- the model


class Loaded:
    """What transformers says of the load: the model's tensors, those that no file gives, and those that have no place."""

    def __init__(self, model: Any, info: Mapping[str, Any]) -> None:
        self.names, self.buffers = set(model.state_dict()), {name for name, _ in model.named_buffers()}
        self.lacking = {name for name in info["missing_keys"] if name in self.names}
        # Before 5 it names them alone.
        told = [each if isinstance(each, tuple) else (each, (), ()) for each in info["mismatched_keys"]]
        self.misshapen = {name: (list(has), list(wants)) for name, has, wants in told}
        self.unexpected = set(info["unexpected_keys"])


def load_without_memory(folder: Path, config: Mapping[str, Any], tensors: Mapping[str, tuple[str, Shape]]) -> Loaded:
    torch: Any = importlib.import_module("torch")
    transformers: Any = importlib.import_module("transformers")
    # It may have names that this one does not read.
    if major_of(config.get("transformers_version", "")) > major_of(transformers.__version__):
        raise UnsureError(f"a newer transformers than {transformers.__version__} wrote the model's configuration")
    named = config.get("architectures")
    architecture = named[0] if isinstance(named, list) and named else None
    made = getattr(transformers, str(architecture), None)
    if made is None:
        raise UnsureError(f"transformers {transformers.__version__} has no {architecture}")
    content = {
        name: torch.empty(shape, dtype=getattr(torch, TYPES[kind]), device="meta") for name, (kind, shape) in tensors.items()
    }
    do_without_accelerate(transformers.__version__)
    model, info = made.from_pretrained(
        None,
        config=transformers.AutoConfig.from_pretrained(folder, trust_remote_code=False),
        state_dict=content,
        device_map="meta",
        ignore_mismatched_sizes=True,
        output_loading_info=True,
    )
    return Loaded(model, info)


def major_of(version: object) -> int:
    major = str(version).partition(".")[0]
    return int(major) if major.isdecimal() else 0


def do_without_accelerate(version: str) -> None:
    """transformers 5 asks for accelerate wherever a device is named. For no device at all it does not use it."""
    if major_of(version) > 4:
        integration: Any = importlib.import_module("transformers.integrations.accelerate")
        integration.is_accelerate_available = lambda *_, **__: True


def judge(loaded: Loaded, tensors: Mapping[str, Any]) -> Answer:
    found = set(map(kind_of, loaded.names - loaded.lacking - loaded.misshapen.keys()))
    # Buffers that no layer has in the files, the model makes itself.
    made = {name for name in loaded.buffers if kind_of(name) not in found}
    faulty = {name for name in {*loaded.lacking, *loaded.misshapen} - made if not name.endswith(MAY_BE_TIED)}
    of_layers = {name for name in faulty if LAYER in kind_of(name)}
    certain = {name for name in of_layers if kind_of(name) in found}
    if not loaded.unexpected and certain == of_layers:
        certain = faulty
    if faulty and not certain:
        raise UnsureError(f"{len(faulty):,} parameters and {len(loaded.unexpected):,} of {len(tensors):,} tensors do not match")
    misshapen = [[name, has, wants] for name, (has, wants) in loaded.misshapen.items() if name in certain]
    return make_answer(loaded.lacking & certain, misshapen)


def kind_of(name: str) -> str:
    """The name without the numbers of layers and experts."""
    return re.sub(r"(?<=\.)\d+(?=\.)", LAYER, name)


if __name__ == "__main__":
    main()
