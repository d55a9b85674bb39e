"""Files in safetensors' form, made byte by byte."""

import json
from pathlib import Path

# A tensor of twelve bytes.
TENSOR: dict[str, object] = {"dtype": "BF16", "shape": [2, 3], "data_offsets": [0, 12]}


def write_file(path: Path, header: object, size: int = 16) -> None:
    """A file with this header, or these bytes in its place, and so many bytes of tensors."""
    written = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(len(written).to_bytes(8, "little") + written + b"\0" * size)


def write_tensors(path: Path, *names: str) -> None:
    tensors = {name: TENSOR | {"data_offsets": [number * 12, (number + 1) * 12]} for number, name in enumerate(names)}
    write_file(path, tensors, 12 * len(names))


def drop_tensor(path: Path, name: str) -> None:
    """Write a file again without one of its tensors."""
    body = path.read_bytes()
    begin = 8 + int.from_bytes(body[:8], "little")
    header, tensors = json.loads(body[8:begin]), b""
    for each, about in list(header.items()):
        if each in (name, "__metadata__"):
            continue
        first, last = about["data_offsets"]
        about["data_offsets"] = [len(tensors), len(tensors) + last - first]
        tensors += body[begin + first : begin + last]
    del header[name]
    written = json.dumps(header).encode()
    path.write_bytes(len(written).to_bytes(8, "little") + written + tensors)
