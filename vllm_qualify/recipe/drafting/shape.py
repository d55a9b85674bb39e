"""What a model is by its configuration: its kind, its context, the shape of its attention, and how its weights are written."""

import re
from collections.abc import Iterator
from typing import Any, NamedTuple

from vllm_qualify.errors import CallerError
from vllm_qualify.recipe.drafting.model_files import CONFIG, REMEDY, Document, ModelFiles
from vllm_qualify.recipe.loading import short

# Where a configuration of several parts has that of its language model.
TEXT_PARTS = ("text_config", "llm_config", "language_config", "language_model_config")
# The keys of which vLLM takes the smallest as the context (get_hf_text_config and derived_max_model_len_and_key in 0.32).
CONTEXTS = (
    *("max_position_embeddings", "n_positions", "max_seq_len", "seq_length", "model_max_length", "max_sequence_length"),
    *("max_seq_length", "seq_len", "n_ctx"),
)
# Those with which a configuration's context is already the scaled one (vllm/config/model.py, _get_and_verify_max_len).
SCALED_ALREADY = ("su", "longrope", "llama3", "yarn", "deepseek_yarn", "deepseek_llama_scaling")
ASSUMED_CONTEXT_TOK = 2048
BYTES = {"float32": 4, "float": 4, "float16": 2, "half": 2, "bfloat16": 2}
SHORT = {"float32": "fp32", "float": "fp32", "float16": "fp16", "half": "fp16", "bfloat16": "bf16"}
UNKNOWN_WEIGHTS = "weights"
SAMPLING = ("temperature", "top_p", "top_k", "min_p")
MOST_WHOLE = 10**9


class Shape(NamedTuple):
    """`attention_layers` keep all tokens, `sliding_layers` the last `window_tok`, and others a fixed state.

    `kv_bytes` is what one layer keeps of one token, on all GPUs together. `samples` says whether generation_config.json
    recommends how tokens are chosen.
    """

    architecture: str
    model_type: str
    context_tok: int
    context_by: str
    heads: int | None
    kv_heads: int | None
    attention_layers: int
    sliding_layers: int
    window_tok: int | None
    kv_bytes: int
    weights: str
    sees: bool
    hears: bool
    samples: bool
    needs_code: str | None

    @property
    def is_quantized(self) -> bool:
        return self.weights not in (*SHORT.values(), UNKNOWN_WEIGHTS)

    def cache_bytes(self, tokens: int) -> int:
        """What the KV cache holds of one sequence."""
        within = min(tokens, self.window_tok or tokens)
        return self.kv_bytes * (self.attention_layers * tokens + self.sliding_layers * within)


def describe_shape(files: ModelFiles) -> Shape:
    """Raises CallerError if a value of the configuration is of a wrong type, or the product cannot qualify such a model."""
    config = _Values(files.config, f"{files.source}: {CONFIG}")
    architecture = _name_architecture(config)
    _check_kind(files, config, architecture)
    text = config.part(*TEXT_PARTS) or config
    heads, kv_heads, kv_bytes = _describe_attention(text)
    attention, sliding, window = _count_layers(text)
    context_tok, context_by = _find_context(config, text)
    return Shape(
        architecture=architecture,
        model_type=config.text("model_type") or "",
        context_tok=context_tok,
        context_by=context_by,
        heads=heads,
        kv_heads=kv_heads,
        attention_layers=attention,
        sliding_layers=sliding,
        window_tok=window,
        kv_bytes=kv_bytes,
        weights=_name_weights(files, config, text),
        sees=config.part("vision_config", "vit_config", "vision_tower_config") is not None,
        hears=config.part("audio_config", "speech_config") is not None,
        samples=_recommends_sampling(files),
        needs_code=_find_code(files),
    )


class _Values:
    """A configuration's values, each of its type. An absent value and null are None."""

    def __init__(self, document: Document, place: str) -> None:
        self.document, self.place = document, place

    def refuse(self, key: str, wanted: str) -> CallerError:
        return CallerError(f"{key} is {short(self.document[key])}, where {wanted} is meant", REMEDY, self.place)

    def whole(self, *keys: str) -> int | None:
        return next((found for key in keys if (found := self._whole(key)) is not None), None)

    def _whole(self, key: str) -> int | None:
        value = self.document.get(key)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int | float) or value != value or not 0 <= value < 2**63:
            raise self.refuse(key, "a whole number")
        if value != int(value):
            raise self.refuse(key, "a whole number")
        return int(value)

    def text(self, key: str) -> str | None:
        value = self.document.get(key)
        if value is None:
            return None
        if not isinstance(value, str) or len(value) > 200 or not value.isprintable():
            raise self.refuse(key, "a word")
        return value

    def words(self, key: str) -> list[str]:
        value = self.document.get(key)
        if value is None:
            return []
        if not isinstance(value, list) or not all(isinstance(each, str) for each in value):
            raise self.refuse(key, "a list of words")
        return value

    def part(self, *keys: str) -> "_Values | None":
        for key in keys:
            value = self.document.get(key)
            if value is None:
                continue
            if not isinstance(value, dict):
                raise self.refuse(key, "an object")
            return _Values(value, f"{self.place}: {key}")
        return None

    def parts(self) -> Iterator[Document]:
        """Itself, and the objects in it."""
        yield self.document
        yield from (value for value in self.document.values() if isinstance(value, dict))


# --- kind


def _name_architecture(config: _Values) -> str:
    named = config.words("architectures")
    if not named or not re.fullmatch(r"\w{1,100}", named[0]):
        problem = "it names no architecture of a model"
        raise CallerError(problem, "name the folder of a whole model: a LoRA adapter or a part of one is none", config.place)
    return named[0]


def _check_kind(files: ModelFiles, config: _Values, architecture: str) -> None:
    """Raises CallerError for a model that is asked in another way than by completions or chats."""
    kind = ""
    if config.document.get("is_encoder_decoder") is True:
        kind = "is an encoder with a decoder, as models of speech and of translation are"
    elif architecture.endswith(("ForSequenceClassification", "ForTokenClassification", "RewardModel", "ForReward")):
        kind = "scores texts, as rerankers and reward models do"
    elif files.is_pooled or architecture.endswith("ForMaskedLM") or _is_bare_model(architecture):
        kind = "embeds texts"
    if kind:
        by = f"its architecture is {architecture}" + (", and its output is pooled" if files.is_pooled else "")
        problem = f"the model {kind} ({by}): vllm-qualify qualifies models that write text alone"
        raise CallerError(problem, "name a model that completes texts or chats", files.source)


def _is_bare_model(architecture: str) -> bool:
    """Whether it has no head that writes text. Some that have one are named so: GPT2LMHeadModel, InternVLChatModel."""
    return architecture.endswith("Model") and not re.search("Chat|LMHead", architecture)


def _find_code(files: ModelFiles) -> str | None:
    """Why vLLM would need code that came with the model, by its tokenizer; None if it needs none for that."""
    mapped = files.tokenizer.get("auto_map")
    is_mapped = isinstance(mapped, dict) and "AutoTokenizer" in mapped
    return "its tokenizer is code that came with it" if is_mapped and "tokenizer.json" not in files.names else None


# --- context


def _find_context(config: _Values, text: _Values) -> tuple[int, str]:
    """The longest context in tokens, prompt and reply, as vLLM derives it, and where it is from."""
    found = {key: value for key in CONTEXTS if (value := text._whole(key))} or {
        key: value for key in CONTEXTS if (value := config._whole(key))
    }
    if not found:
        return ASSUMED_CONTEXT_TOK, f"{CONFIG} says none, and vLLM then assumes it"
    key, context = min(found.items(), key=lambda item: item[1])
    by = f"{CONFIG}: {key}"
    factor, kind = _find_scaling(text)
    if factor > 1 and "gemma3" not in (config.text("model_type") or ""):
        context, by = int(context * factor), f"{by}, times {factor:g} by its {kind} scaling"
    elif kind not in ("", "default"):
        by += f", with its {kind} scaling"
    if not 0 < context <= MOST_WHOLE:
        raise CallerError(f"its context of {context:,} tokens is none of a model", REMEDY, config.place)
    return context, by


def _find_scaling(text: _Values) -> tuple[float, str]:
    """The factor over the written context, and the kind of scaling; 1 where there is none, or the context has it already."""
    scaling = text.part("rope_scaling", "rope_parameters")
    if scaling is None:
        return 1.0, ""
    # Since transformers 5 each kind of layers may have its own.
    layers = [value for value in scaling.document.values() if isinstance(value, dict)] or [scaling.document]
    kinds = [each.get("rope_type", each.get("type")) for each in layers]
    scaled = [(each, kind) for each, kind in zip(layers, kinds, strict=True) if kind not in (None, "default")]
    if not scaled or not isinstance(kind := scaled[0][1], str):
        return 1.0, ""
    kind = kind if kind.isidentifier() else "unknown"
    factor = scaled[0][0].get("factor")
    if kind in SCALED_ALREADY or isinstance(factor, bool) or not isinstance(factor, int | float) or not 1 < factor < 1000:
        return 1.0, kind
    return float(factor), kind


# --- attention


def _describe_attention(text: _Values) -> tuple[int | None, int | None, int]:
    """Heads, heads of the KV cache, and the bytes that one layer keeps of a token, as 16-bit numbers."""
    heads = text.whole("num_attention_heads", "n_head", "num_heads")
    if rank := text.whole("kv_lora_rank"):
        # Multi-head latent attention keeps one compressed vector for all heads.
        return heads, 1, 2 * (rank + (text.whole("qk_rope_head_dim") or 0))
    kv_heads = text.whole("num_key_value_heads", "num_kv_heads", "multi_query_group_num") or heads
    size = text.whole("head_dim")
    if size is None and heads:
        size = (text.whole("hidden_size", "n_embd", "d_model") or 0) // heads
    return heads, kv_heads, 2 * 2 * (kv_heads or 0) * (size or 0)


def _count_layers(text: _Values) -> tuple[int, int, int | None]:
    """Layers that attend to all tokens, layers that attend to a window, and the window. Layers of a state count for neither."""
    layers, window = text.whole("num_hidden_layers", "n_layer", "num_layers") or 0, text.whole("sliding_window")
    kinds = text.document.get("layer_types") or text.document.get("layers_block_type")
    if isinstance(kinds, list) and kinds and all(isinstance(each, str) for each in kinds):
        sliding = sum("sliding" in each or "chunked" in each for each in kinds)
        attention = sum("attention" in each and "linear" not in each for each in kinds) - sliding
        return (attention, sliding, window) if window else (attention + sliding, 0, None)
    if every := text.whole("full_attention_interval"):
        return layers // every, 0, None
    if window and (every := text.whole("sliding_window_pattern")):
        return layers // every, layers - layers // every, window
    is_used = window and text.document.get("use_sliding_window", True) is True
    return (0, layers, window) if is_used else (layers, 0, None)


# --- weights


def _name_weights(files: ModelFiles, config: _Values, text: _Values) -> str:
    """How the weights are written, as a variant is named: `fp8`, `awq`, `mxfp4`, `bf16`."""
    for part in (config, text):
        about: dict[str, Any] = {}
        for key in ("quantization_config", "compression_config"):
            given = part.document.get(key)
            about |= given if isinstance(given, dict) else {}
        method = about.get("quant_method")
        if isinstance(method, str) and re.fullmatch(r"[A-Za-z0-9_.-]{1,40}", method):
            return method.lower().replace("_", "-")
    if files.quantized_by:
        return re.sub(r"[^a-z0-9]+", "-", files.quantized_by.lower()).strip("-")[:40] or "quantized"
    for part in (config, text):
        for key in ("dtype", "torch_dtype"):
            if (named := part.document.get(key)) is not None and str(named) in SHORT:
                return SHORT[str(named)]
    return UNKNOWN_WEIGHTS


def _recommends_sampling(files: ModelFiles) -> bool:
    """Whether generation_config.json says that tokens are drawn, and from what."""
    about = files.generation
    if about.get("do_sample") is not None:
        return about["do_sample"] is True
    numbers = (about.get(key) for key in SAMPLING)
    return any(isinstance(value, int | float) and not isinstance(value, bool) for value in numbers)
