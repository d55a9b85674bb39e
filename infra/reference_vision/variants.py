"""A copy of the model whose vision has collapsed while its text is fine. Made by code: none is kept."""

import json
import shutil
from pathlib import Path

CONNECTOR = "model.connector.modality_projection.proj.weight"


def collapsed(model: Path, folder: Path) -> Path:
    """The model in a folder of its own, with a connector of zeros: all pictures look alike to the Llama behind it."""
    shutil.copytree(model, folder)
    file = folder / "model.safetensors"
    body = bytearray(file.read_bytes())
    # The file's form: the length of a header in JSON, the header, then the values. It is that of safetensors.
    header_bytes = int.from_bytes(body[:8], "little")
    first, end = (8 + header_bytes + offset for offset in json.loads(body[8 : 8 + header_bytes])[CONNECTOR]["data_offsets"])
    body[first:end] = bytes(end - first)
    file.write_bytes(body)
    return folder
