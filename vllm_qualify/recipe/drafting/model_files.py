"""The small files that describe a model, from its folder: bounded, of regular files alone, and typed where they are used."""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from stat import S_ISREG
from typing import Any, NamedTuple

from vllm_qualify.errors import CallerError

Document = dict[str, Any]

CONFIG, GENERATION, TOKENIZER_CONFIG, TOKENIZER = (
    "config.json",
    "generation_config.json",
    "tokenizer_config.json",
    "tokenizer.json",
)
TEMPLATE, JSON_TEMPLATE = "chat_template.jinja", "chat_template.json"
INDEX, BIN_INDEX = "model.safetensors.index.json", "pytorch_model.bin.index.json"
TEKKEN, QUANTIZED = "tekken.json", "hf_quant_config.json"
# Where sentence-transformers writes that a model's output is pooled.
POOLING = ("modules.json", "config_sentence_transformers.json")
SMALL = (
    CONFIG,
    GENERATION,
    TOKENIZER_CONFIG,
    TOKENIZER,
    TEMPLATE,
    JSON_TEMPLATE,
    INDEX,
    BIN_INDEX,
    TEKKEN,
    QUANTIZED,
    *POOLING,
)
"""What is read of a model, where it is there."""
TOKENIZERS = (TOKENIZER, TEKKEN, "tokenizer.model", "tiktoken.model", "vocab.json", "spiece.model", "sentencepiece.bpe.model")
# A vocabulary of 262,144 tokens takes 33 MB.
MOST_BYTES, MOST_TOKENIZER_BYTES, MOST_TEMPLATE_CHARACTERS = 16_000_000, 128_000_000, 1_000_000
REMEDY = "take the file as its publisher has it"
WEIGHTS = (".safetensors", ".bin", ".gguf", ".pt", ".pth")
# Markup of chats: <|im_start|>, [TOOL_CALLS], </think>. Tokens in reserve have numbers.
_MARKUP = re.compile(r"[<\[][^\s<>\[\]]{1,60}[>\]]")
_IN_RESERVE = re.compile(
    r"(?i)(reserve|unused|extra|dummy|placeholder|special|fim|img|image|loc|seg|audio)\w*\W?\d+|<0x..>|\d{3}"
)
# What a byte-level vocabulary has of markup that is no token of its own: `</`, ` </`, `think`, `>` and line breaks.
_PIECE = re.compile(r"[Ġ▁]?(?:[<>/\[\]|]{1,3}Ċ{0,2}|think)")
MOST_MARKUP, MOST_MARKUP_CHARACTERS = 2_000, 40_000


class ModelFiles(NamedTuple):
    """What a model's files say. `names` are all of its files with their bytes; `source` is where it is, for messages.

    `templates` are the chat's, by name: `default`, and `tool_use` where requests with tools have their own. `markup` are the
    tokens of the vocabulary that look like markup, `pieces` those that markup without a token of its own is made of.
    """

    source: str
    config: Document
    generation: Document
    tokenizer: Document
    templates: dict[str, str]
    template_file: str
    markup: list[str]
    pieces: list[str]
    names: Mapping[str, int]
    weights_bytes: int | None
    weights_by: str
    is_pooled: bool
    quantized_by: str | None


def read_model_files(folder: Path, source: str, sizes: Mapping[str, int] | None = None) -> ModelFiles:
    """Read a model's folder. `sizes` are the bytes of its files where the folder does not have all of them.

    Raises CallerError if there is no `config.json`, or one of the files cannot be read or is not of its form.
    """
    read = _Reader(folder, source)
    config = read.document(CONFIG)
    if config is None:
        remedy = "name a folder with a config.json, or a repository of the hub like Qwen/Qwen3-0.6B"
        raise CallerError(f"there is no {CONFIG} in {source}", remedy, "MODEL")
    tokenizer = read.document(TOKENIZER_CONFIG) or {}
    templates, template_file = _read_templates(read, tokenizer)
    names = dict(sizes) if sizes is not None else _list_sizes(folder, source)
    weights_bytes, weights_by = _sum_weights(names, read)
    tokens = list(dict.fromkeys(_name_tokens(read, tokenizer)))
    return ModelFiles(
        source=source,
        config=config,
        generation=read.document(GENERATION) or {},
        tokenizer=tokenizer,
        templates=templates,
        template_file=template_file,
        markup=_list_markup(tokens),
        pieces=[token for token in tokens if _PIECE.fullmatch(token)][:MOST_MARKUP],
        names=names,
        weights_bytes=weights_bytes,
        weights_by=weights_by,
        is_pooled=any(name in names for name in POOLING),
        quantized_by=_find_quantizer(read),
    )


class _Reader:
    def __init__(self, folder: Path, source: str) -> None:
        self.folder, self.source = folder, source

    def place(self, name: str) -> str:
        return f"{self.source}: {name}"

    def text(self, name: str, most_bytes: int = MOST_BYTES) -> str | None:
        """The text of a file; None if it is not there. A pipe or a device is refused before it is opened."""
        file = self.folder / name
        try:
            status = file.stat()
            if not S_ISREG(status.st_mode):
                raise CallerError("it is no regular file", REMEDY, self.place(name))
            with file.open("rb") as opened:
                body = opened.read(most_bytes + 1)
        except FileNotFoundError:
            if file.is_symlink():
                raise CallerError("it is a link to a file that is not there", REMEDY, self.place(name)) from None
            return None
        except OSError as error:
            problem = f"it cannot be read: {error.strerror}"
            raise CallerError(problem, "check the file and its permissions", self.place(name)) from error
        if len(body) > most_bytes:
            raise CallerError(f"it has more than {most_bytes:,} bytes", REMEDY, self.place(name))
        try:
            return body.decode("utf-8")
        except UnicodeDecodeError as error:
            raise CallerError("it is not UTF-8", REMEDY, self.place(name)) from error

    def value(self, name: str, most_bytes: int = MOST_BYTES) -> Any:
        text = self.text(name, most_bytes)
        if text is None:
            return None
        try:
            return json.loads(text)
        except RecursionError as error:
            raise CallerError("its JSON is nested too deeply", REMEDY, self.place(name)) from error
        except ValueError as error:
            raise CallerError(f"it is no JSON: {str(error)[:100]}", REMEDY, self.place(name)) from error

    def document(self, name: str, most_bytes: int = MOST_BYTES) -> Document | None:
        value = self.value(name, most_bytes)
        if value is not None and not isinstance(value, dict):
            raise CallerError("it is no JSON object", REMEDY, self.place(name))
        return value


def _list_sizes(folder: Path, source: str) -> dict[str, int]:
    try:
        return {path.name: path.stat().st_size for path in folder.iterdir() if path.is_file()}
    except OSError as error:
        raise CallerError(f"{source} cannot be read: {error.strerror}", "check the folder", "MODEL") from error


# --- chat templates


def _read_templates(read: _Reader, tokenizer: Document) -> tuple[dict[str, str], str]:
    """The templates, and their file. A file of their own goes before the tokenizer's configuration, as in transformers."""
    if (text := read.text(TEMPLATE)) is not None:
        return _check_templates({"default": text}, read.place(TEMPLATE)), TEMPLATE
    if (document := read.document(JSON_TEMPLATE)) is not None:
        return _check_templates(_name_templates(document), read.place(JSON_TEMPLATE)), JSON_TEMPLATE
    return _check_templates(_name_templates(tokenizer), read.place(TOKENIZER_CONFIG)), TOKENIZER_CONFIG


def _name_templates(document: Document) -> dict[Any, Any]:
    """One template, or a list of objects with `name` and `template`."""
    given = document.get("chat_template")
    if isinstance(given, list):
        entries = [each if isinstance(each, dict) else {} for each in given]
        return {each.get("name"): each.get("template") for each in entries}
    return {} if given is None else {"default": given}


def _check_templates(templates: dict[Any, Any], place: str) -> dict[str, str]:
    if not all(isinstance(name, str) and isinstance(text, str) for name, text in templates.items()):
        raise CallerError("its chat_template is no text, and no list of named texts", REMEDY, place)
    if any(len(text) > MOST_TEMPLATE_CHARACTERS for text in templates.values()):
        raise CallerError(f"its chat template has more than {MOST_TEMPLATE_CHARACTERS:,} characters", REMEDY, place)
    return {name: text for name, text in templates.items() if text.strip()}


# --- tokens


def _list_markup(tokens: list[str]) -> list[str]:
    """The tokens that look like markup, without those in reserve."""
    kept, characters = list[str](), 0
    for token in filter(_MARKUP.fullmatch, tokens):
        characters += len(token)
        if len(kept) < MOST_MARKUP and characters < MOST_MARKUP_CHARACTERS and not _IN_RESERVE.search(token):
            kept.append(token)
    return kept


def _name_tokens(read: _Reader, tokenizer: Document) -> list[str]:
    whole = read.document(TOKENIZER, MOST_TOKENIZER_BYTES) or {}
    tekken = read.document(TEKKEN, MOST_TOKENIZER_BYTES) or {}
    added = tokenizer.get("added_tokens_decoder")
    listed = [
        *_contents(whole.get("added_tokens"), "content"),
        *_contents(list(added.values()) if isinstance(added, dict) else [], "content"),
        *_contents(tekken.get("special_tokens"), "token_str"),
    ]
    model = whole.get("model")
    vocabulary = model.get("vocab") if isinstance(model, dict) else None
    return [*listed, *(token for token in (vocabulary if isinstance(vocabulary, dict) else ()) if isinstance(token, str))]


def _contents(entries: object, key: str) -> list[str]:
    given = [each.get(key) for each in entries if isinstance(each, dict)] if isinstance(entries, list) else []
    return [content for content in given if isinstance(content, str)]


def token_text(value: object) -> str:
    """The text of a token in a tokenizer's configuration: a text, or an object with its `content`; empty for anything else."""
    content = value.get("content") if isinstance(value, dict) else value
    return content if isinstance(content, str) else ""


# --- weights


def _sum_weights(names: Mapping[str, int], read: _Reader) -> tuple[int | None, str]:
    """The bytes of the weights in the form that vLLM prefers, and where they are from; None if nothing tells them."""
    for end in WEIGHTS:
        files = [name for name in names if name.endswith(end) and "/" not in name]
        # A second copy of the weights, in Mistral's own form.
        files = [name for name in files if not name.startswith("consolidated")] or files
        if files and all(names[name] > 0 for name in files):
            return sum(names[name] for name in files), f"its {end} files"
    for index in (INDEX, BIN_INDEX):
        about = (read.document(index) or {}).get("metadata")
        total = about.get("total_size") if isinstance(about, dict) else None
        if isinstance(total, int | float) and not isinstance(total, bool) and 0 < total < 2**50:
            return int(total), index
    return None, ""


def _find_quantizer(read: _Reader) -> str | None:
    """The algorithm in the file that NVIDIA's Model Optimizer writes beside a configuration that does not say it."""
    about = (read.document(QUANTIZED) or {}).get("quantization")
    named = about.get("quant_algo") if isinstance(about, dict) else None
    return named if isinstance(named, str) else None
