"""Tiny checkpoints of well-known architectures, and what the probe says of them when a tensor is gone or has another shape.

A script for the engine's Python: its arguments are the probe's file and a folder. Its last line is JSON: for each architecture
how many tensors were tried, what was said of the whole checkpoint, and which faults were not told.
"""

import importlib
import importlib.util
import json
import re
import sys
from pathlib import Path
from typing import Any

torch: Any = importlib.import_module("torch")
transformers: Any = importlib.import_module("transformers")
files: Any = importlib.import_module("safetensors.torch")

SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 64,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
}
MLA = {"kv_lora_rank": 8, "q_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 8}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 16}
DEEPSEEK = {"n_routed_experts": 4, "n_group": 2, "topk_group": 1, **EXPERTS, **MLA}
TWO_OF_EACH = {"num_hidden_layers": 4, "first_k_dense_replace": 2}
CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {}),
    "qwen2, tied": ("Qwen2Config", {"tie_word_embeddings": True}),
    "qwen3": ("Qwen3Config", {"head_dim": 8}),
    "qwen3_moe": ("Qwen3MoeConfig", {"head_dim": 8, "num_experts": 4, **EXPERTS}),
    "mixtral": ("MixtralConfig", {"num_local_experts": 4}),
    "gemma3": ("Gemma3TextConfig", {"head_dim": 8}),
    "gpt_oss": ("GptOssConfig", {"head_dim": 8, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "phi3": ("Phi3Config", {}),
    "deepseek_v3": ("DeepseekV3Config", DEEPSEEK | TWO_OF_EACH),
    "mistral": ("MistralConfig", {}),
    "olmo2": ("Olmo2Config", {}),
    "granite": ("GraniteConfig", {}),
    "cohere2, tied": ("Cohere2Config", {}),
    "glm4": ("Glm4Config", {"head_dim": 8}),
    "qwen3_next": ("Qwen3NextConfig", {"head_dim": 8, "num_experts": 4, "shared_expert_intermediate_size": 16, **EXPERTS}),
    "nemotron_h": ("NemotronHConfig", {"head_dim": 8, "hybrid_override_pattern": "M*M*", "num_hidden_layers": 4}),
}
# A file without it is as whole as with it: vLLM ties the two, or says itself that it cannot.
TIED = ("lm_head.weight", "embed_tokens.weight")
NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")


def read_probe(file: str) -> Any:
    specification: Any = importlib.util.spec_from_file_location("probe", file)
    probe: Any = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(probe)
    return probe


def said_of(probe: Any, folder: Path, tensors: dict[str, Any]) -> dict[str, Any]:
    files.save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    try:
        answer: dict[str, Any] = probe.answer_about(folder)
    except Exception as error:  # as the probe itself does, which is then unsure
        return {"lacking": [], "misshapen": [], "unsure": f"{type(error).__name__}: {error}"[:200]}
    return answer


def is_told(answer: dict[str, Any]) -> bool:
    return bool(answer["lacking"] or answer["misshapen"])


def try_faults(probe: Any, name: str, folder: Path) -> dict[str, Any]:
    kind, own = CONFIGS[name]
    transformers.AutoModelForCausalLM.from_config(getattr(transformers, kind)(**(SIZES | own))).save_pretrained(folder)
    tensors = files.load_file(folder / "model.safetensors")
    whole, untold = said_of(probe, folder, tensors), []
    # One of each kind: those of other layers and experts have its name but for a number.
    tried = list({NUMBER.sub("", each): each for each in tensors if not each.endswith(TIED)}.values())
    for each in tried:
        rest = {other: tensor for other, tensor in tensors.items() if other != each}
        longer = torch.zeros((tensors[each].shape[0] + 1, *tensors[each].shape[1:]), dtype=tensors[each].dtype)
        for fault, given in (("lacking", rest), ("misshapen", rest | {each: longer})):
            answer = said_of(probe, folder, given)
            if not is_told(answer):
                untold.append([fault, each, answer["unsure"]])
    return {"tried": len(tried), "whole": whole, "untold": untold}


if __name__ == "__main__":
    transformers.logging.set_verbosity_error()
    found = {name: try_faults(read_probe(sys.argv[1]), name, Path(sys.argv[2], name.partition(",")[0])) for name in CONFIGS}
    print(json.dumps(found))
