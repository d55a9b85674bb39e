"""Models of well-known families without weights: published configurations made small, own templates in their markup.

tests/recipe/families has one file for each. `expected` is what a person who reads the model's card says of it.
"""

import json
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML

FOLDER = Path(__file__).parents[1] / "recipe" / "families"
NAMES = sorted(path.stem for path in FOLDER.glob("*.yaml"))
# The letters of a byte-level vocabulary, of which each text can be made, and what markup without a token of its own needs.
PIECES = [*(chr(code) for code in range(33, 127)), "Ġ", "Ċ", "Ġ</", "</", "think", ">", ">Ċ", ">ĊĊ"]

Document = dict[str, Any]


def read_family(name: str) -> Document:
    document: Document = YAML(typ="safe", pure=True).load((FOLDER / f"{name}.yaml").read_text(encoding="utf-8"))
    return document


def make_family(name: str, folder: Path) -> Path:
    """The model's folder, in `folder`."""
    return make_model(read_family(name), folder / name)


def make_model(document: Document, model: Path) -> Path:
    model.mkdir(parents=True)
    files: Document = {"config.json": document["config"], **document.get("files", {})}
    if "generation" in document:
        files["generation_config.json"] = document["generation"]
    files["tokenizer_config.json"] = document.get("tokenizer", {})
    if "weights_bytes" in document:
        files["model.safetensors.index.json"] = {"metadata": {"total_size": document["weights_bytes"]}, "weight_map": {}}
    if template := document.get("template"):
        if document.get("template_in") == "chat_template.json":
            files["chat_template.json"] = {"chat_template": template}
        else:
            (model / "chat_template.jinja").write_text(template, encoding="utf-8")
    if "tokenizer_file" in document:
        (model / document["tokenizer_file"]).write_bytes(b"")
    else:
        files["tokenizer.json"] = _make_tokenizer(document.get("tokens", []))
    for name, content in files.items():
        (model / name).write_text(json.dumps(content, ensure_ascii=False), encoding="utf-8")
    return model


def _make_tokenizer(tokens: list[str]) -> Document:
    vocabulary = {piece: number for number, piece in enumerate(dict.fromkeys(PIECES))}
    added = [
        {
            "id": len(vocabulary) + number,
            "content": token,
            "special": True,
            **dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False),
        }
        for number, token in enumerate(tokens)
    ]
    return {
        "version": "1.0",
        "added_tokens": added,
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "model": {"type": "BPE", "vocab": vocabulary, "merges": []},
    }
