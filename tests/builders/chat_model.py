"""The chat model's recipe, for a copy of the model."""

from pathlib import Path

from ruamel.yaml import YAML

from tests.recipes import Document, write
from vllm_qualify.recipe.loading import catalog_folder

MODEL = catalog_folder() / "reference-chat" / "model"
Server = dict[str, object]
# A reply that never ends is cut at half of it.
SHORT: Server = {"max-model-len": 256}
SHORT_LOAD: Document = {"input_len": 8, "output_len": 8, "num_warmups": 0}


def recipe(folder: Path, model: Path, server: Server) -> Path:
    """The chat model's recipe, of another copy of it, with these options."""
    document: Document = YAML(typ="safe").load((catalog_folder() / "reference-chat.yaml").read_text())
    document["variants"]["bf16"]["model"] = str(model)
    document["aliases"] = ["an-alias", "Org/Chat-Model"]
    serving = document["gpu_types"]["cpu"]
    serving["server"] |= server
    trace = serving["profiles"]["traffic"]["load"]
    trace["trace"] = str(catalog_folder() / trace["trace"])
    if server.items() >= SHORT.items():
        # No load is run, but all must fit.
        serving["profiles"] = {"chats": {"load": SHORT_LOAD, "paths": False}}
    for name, file in document["accuracy"][0]["questions"].items():
        document["accuracy"][0]["questions"][name] = str(catalog_folder() / file)
    return write(document, folder / "mine.yaml")
