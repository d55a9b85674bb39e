"""Whether a checkpoint's weights are whole, by the headers of its safetensors files and their index, before a GPU is held.

vLLM 0.32 serves a checkpoint that lacks a tensor as if it were whole. The form of a file is that of safetensors' README,
"Format": eight bytes with the header's length, the header as JSON, and the tensors' bytes without a gap.
"""

import json
import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, NoReturn, TypeGuard

from vllm_qualify.errors import ReleaseError, writing

# The bits of an element. A type that is not here is not held to its size.
_BITS = {
    **dict.fromkeys(("F64", "I64", "U64", "C64"), 64),
    **dict.fromkeys(("F32", "I32", "U32"), 32),
    **dict.fromkeys(("F16", "BF16", "I16", "U16"), 16),
    **dict.fromkeys(("F8_E4M3", "F8_E5M2", "F8_E8M0", "I8", "U8", "BOOL"), 8),
}
# safetensors itself refuses longer headers.
MOST_HEADER_BYTES = 100_000_000
MOST_INDEX_BYTES = 200_000_000
_LENGTH_BYTES = 8
_SHARD = re.compile(r"(?P<name>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.safetensors")
_ABOUT = "__metadata__"
INDEX = "model.safetensors.index.json"
# Vocabularies of transformers and of Mistral, code that brings one of its own, and GGUF files, which have theirs in them.
_OF_TOKENIZER = re.compile(
    r"tokenizer(?!_config\.json).*|tekken.*\.json|vocab.*|merges\.txt|.*\.(tiktoken|model|gguf)|tokenization_.*\.py"
)
MAY_BE_TIED = ("lm_head.weight", "embed_tokens.weight", "embedding.weight", "wte.weight", "shared.weight", "score.weight")
MOST_NAMED = 3


# Of `load-format`: those that read safetensors files by vLLM's own loader.
USUAL_LOADERS = ("auto", "hf", "safetensors")


def refuse_weights(model: str, problem: str, place: str) -> NoReturn:
    """Raises ReleaseError of the kind `incomplete-model`."""
    remedy = "complete the repository's or the folder's files; remove a broken copy from the hub's cache"
    raise ReleaseError(f"the weights of {model} are not whole: {problem}", remedy, place, kind="incomplete-model")


class _Tensor(NamedTuple):
    begin: int
    end: int


def check_weights(folder: Path, model: str, place: str) -> None:
    """Check the safetensors files at the top of a model's folder, as vLLM's usual loader reads them.

    A folder without any is not checked, nor is an index of another form of the weights (`consolidated.safetensors.index.json`).
    Raises ReleaseError of the kind `incomplete-model` if a file is cut or broken, a tensor of the index is not in its file, two
    files have one tensor, or a part of several is not there; HostError if a file cannot be read.
    """
    checked = _Checkpoint(folder, model, place)
    with writing(place):
        files = {path.name: path for path in _list_files(folder)}
        headers = {name: checked.read_header(path) for name, path in files.items()}
        index = folder / INDEX
        if files and index.is_file():
            checked.check_index(index, headers)
        else:
            checked.check_parts(files)


def check_tokenizer(folder: Path, model: str, place: str) -> None:
    """Raises ReleaseError of the kind `incomplete-model` if no file of a folder can be a tokenizer; HostError."""
    with writing(place):
        names = [path.name for path in folder.iterdir()]
    if not any(_OF_TOKENIZER.fullmatch(name) for name in names):
        remedy = "add its files (tokenizer.json and tokenizer_config.json), or name another folder by the option `tokenizer`"
        raise ReleaseError(f"{model} has no file of a tokenizer", remedy, place, kind="incomplete-model")


def _list_files(folder: Path) -> list[Path]:
    """Without hidden ones, as other systems leave them beside copied files."""
    return sorted(path for path in folder.glob("*.safetensors") if not path.name.startswith("."))


def read_headers(folder: Path) -> Iterator[tuple[str, bytes]]:
    """Each safetensors file's name with its header, of files that `check_weights` has let pass. Raises OSError."""
    for path in _list_files(folder):
        with path.open("rb") as file:
            yield path.name, file.read(int.from_bytes(file.read(_LENGTH_BYTES), "little"))


def tensor_names(folder: Path) -> list[str]:
    """The names of all tensors in the safetensors files at the top of a folder; empty if there are none, or one is broken."""
    checked, names = _Checkpoint(folder, folder.name, ""), list[str]()
    try:
        for path in _list_files(folder):
            names += checked.read_header(path)
    except (OSError, ReleaseError):
        return []
    return names


class _Checkpoint(NamedTuple):
    folder: Path
    model: str
    place: str

    def refuse(self, problem: str) -> NoReturn:
        refuse_weights(self.model, problem, self.place)

    def read_header(self, path: Path) -> dict[str, _Tensor]:
        """The tensors of a file, by their names."""
        size = path.stat().st_size
        with path.open("rb") as file:
            length = int.from_bytes(file.read(_LENGTH_BYTES), "little") if size >= _LENGTH_BYTES else -1
            if not 0 < length <= min(size - _LENGTH_BYTES, MOST_HEADER_BYTES):
                self.refuse(f"{path.name} has {size:,} bytes, and no header that fits into them")
            written = file.read(length)
        header = self._parse(path.name, written)
        tensors = {name: self._read_tensor(path.name, name, about) for name, about in header.items() if name != _ABOUT}
        self._check_bytes(path.name, tensors, size - _LENGTH_BYTES - length)
        return tensors

    def check_index(self, index: Path, headers: Mapping[str, Mapping[str, _Tensor]]) -> None:
        """Check that each tensor of the index is in the file that it names, and that no tensor is in two of these files.

        What the files have beside it is loaded, too: publishers leave such tensors there. Of tied embeddings an index may name
        a second one that no file has (safetensors' own converter does so); vLLM ties them.
        """
        if index.stat().st_size > MOST_INDEX_BYTES:
            self.refuse(f"{index.name} has more than {MOST_INDEX_BYTES:,} bytes")
        named = self._parse(index.name, index.read_bytes()).get("weight_map")
        if not isinstance(named, dict) or not all(isinstance(file, str) for file in named.values()):
            self.refuse(f"{index.name} has no weight_map of names and files")
        if absent := sorted(set(named.values()) - headers.keys()):
            self.refuse(f"{_name_some(absent)}, which {index.name} names, {_is_or_are(absent)} not there")
        missing = [name for name, file in named.items() if name not in headers[file] and not name.endswith(MAY_BE_TIED)]
        if missing:
            self.refuse(f"{index.name} has {_name_some(missing)}, which the file that it names does not have")
        times = Counter(name for file in set(named.values()) for name in headers[file])
        if twice := [name for name, count in times.items() if count > 1]:
            self.refuse(f"{_name_some(twice)} {_is_or_are(twice)} in two files, of which vLLM would take either")

    def check_parts(self, files: Iterable[str]) -> None:
        """Check that of files such as `model-00001-of-00002.safetensors` all are there."""
        parts = [match for file in files if (match := _SHARD.fullmatch(file)) and match["name"] == "model"]
        for name, count in {(part["name"], int(part["count"])) for part in parts}:
            numbers = {int(part["number"]) for part in parts if (part["name"], int(part["count"])) == (name, count)}
            if len(numbers) < count:
                self.refuse(f"of {count} files {name}-…-of-{count:05}.safetensors {len(numbers)} are there")

    def _parse(self, file: str, written: bytes) -> dict[str, Any]:
        try:
            document = json.loads(written, object_pairs_hook=_refuse_twice)
        except (ValueError, RecursionError) as error:
            self.refuse(f"what {file} says of its tensors cannot be read: {str(error)[:200]}")
        if not isinstance(document, dict):
            self.refuse(f"{file} has no JSON object")
        return document

    def _read_tensor(self, file: str, name: str, about: object) -> _Tensor:
        fields = about if isinstance(about, dict) else {}
        kind, shape, offsets = (fields.get(key) for key in ("dtype", "shape", "data_offsets"))
        if not (isinstance(kind, str) and _are_counts(shape) and _are_counts(offsets) and len(offsets) == 2):
            self.refuse(f"{file} does not say type, shape and place of {name[:200]}")
        tensor = _Tensor(*offsets)
        bits = _BITS.get(kind)
        if tensor.end < tensor.begin or (bits and (tensor.end - tensor.begin) * 8 != math.prod(shape) * bits):
            self.refuse(f"{name[:200]} in {file} has {tensor.end - tensor.begin:,} bytes, which is not its shape of {kind}")
        return tensor

    def _check_bytes(self, file: str, tensors: Mapping[str, _Tensor], has: int) -> None:
        end = 0
        for tensor in sorted(tensors.values()):
            if tensor.begin != end:
                self.refuse(f"the tensors of {file} overlap, or leave a gap, at byte {end:,}")
            end = tensor.end
        if end != has:
            self.refuse(f"{file} has {has:,} bytes of tensors, and its header tells of {end:,}")


def _are_counts(value: object) -> TypeGuard[list[int]]:
    return isinstance(value, list) and all(type(each) is int and each >= 0 for each in value)


def _refuse_twice(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    document = dict(pairs)
    if len(document) < len(pairs):
        raise ValueError("a name stands there twice")
    return document


def _name_some(names: list[str]) -> str:
    more = f" and {len(names) - MOST_NAMED:,} more" if len(names) > MOST_NAMED else ""
    return ", ".join(name[:200] for name in names[:MOST_NAMED]) + more


def _is_or_are(names: list[str]) -> str:
    return "is" if len(names) == 1 else "are"
