"""What a drafted recipe asks of a model, and the gates on it: by chats where it chats, and against its own baseline."""

from typing import Any

from vllm_qualify.recipe.drafting.parts import Model
from vllm_qualify.recipe.drafting.yaml_lines import Item, Items

# The longest reply: of a model that thinks, with its thoughts; the examples and the prompt have the rest of the context.
THINKING_TOK, CHAT_TOK, COMPLETION_TOK = 8192, 1024, 256
# A CPU writes some hundred tokens a second at best: it tells whether all works, and little of how well.
CPU_TOK = 256
# Of gsm8k: an example with its solution has fewer tokens.
EXAMPLE_TOK, SHOTS = 512, 5
ALL_QUESTIONS, FEW_QUESTIONS = 1319, 40
# What docs/design/0009 reckons for all of gsm8k.
MAX_LOSS = 0.0075
# In nat per token: an example of docs/recipes.md, ten times what the reference model's recipe allows.
MAX_NLL_INCREASE = 0.01
# As in the catalog: docs/design/0010 says what repeats and starts can show.
MAX_WORSENING = 0.025


def list_tasks(model: Model, context_tok: int, *, is_slow: bool) -> Items:
    """gsm8k, by chats where the model chats, and in comments the presets that fit the model."""
    told = model.told
    task: dict[str, Any] = {"task": "gsm8k"}
    thinks = told is not None and bool(told.thoughts)
    wanted = COMPLETION_TOK if told is None else THINKING_TOK if thinks else CHAT_TOK
    reply = max(1, min(CPU_TOK if is_slow else wanted, context_tok // 2))
    shots = 0 if is_slow else max(0, min(SHOTS, (context_tok - reply) // EXAMPLE_TOK - 1))
    task |= {"num_fewshot": shots, "num_questions": FEW_QUESTIONS if is_slow else ALL_QUESTIONS}
    if told is not None:
        # gsm8k's own texts that end a reply are for completions.
        task |= {"api": "chat", "max_gen_toks": reply, "stop": []}
        task |= {"sampling": "model"} if thinks and model.shape.samples else {}
    why = "by chats, as the model is used" if told else "by completions, as the model is used"
    why += ", with the sampling of generation_config.json" if "sampling" in task else ""
    why += f"; a CPU is slow: all questions are {ALL_QUESTIONS:,}" if is_slow else ""
    return Items([Item(task, why)], [f"- preset: {preset} # {about}" for preset, about in _list_presets(model)])


def _list_presets(model: Model) -> list[tuple[str, str]]:
    """What can be asked beside gsm8k, by docs/accuracy.md."""
    told = model.told
    if told is None:
        return [("base", "mmlu too; it needs `enable-tokenizer-info-endpoint: true`")]
    presets = (
        [("reasoning", "hard questions, as a model that thinks is asked")]
        if told.thoughts
        else [("chat", "knowledge and forms")]
    )
    presets += [("tools", "1,240 calls of tools")] if model.tools.name else []
    presets += [("vision", "charts and exam questions with pictures")] if model.shape.sees else []
    return presets


def list_gates(model: Model, *, has_clients: bool, is_slow: bool) -> Items:
    """Gates against the baseline, which need no number that somebody has measured or promised."""
    form = "strict-match" if model.told is None else "flexible-extract"
    likelihood = {"metric": "answer_nll_nat_per_tok", "max_nll_increase": MAX_NLL_INCREASE, "unit": "nat/tok"}
    changes = "sees other weights, kernels and templates; leave it out for weights that were trained further"
    if is_slow:
        few = f"No gate on exact_match: `recipe bounds` says which loss {FEW_QUESTIONS} questions can show."
        return Items([Item(likelihood, changes)], [few, "No gate on speed: it says little of a CPU."])
    of_score = {"metric": "exact_match", "filter": form, "max_loss": MAX_LOSS, "unit": "fraction"}
    items = [Item(of_score, f"at most {100 * MAX_LOSS:g} % of the questions are lost against the baseline")]
    speeds = ["output_throughput_tok_s"] if has_clients else []
    items += [Item({"metric": name, "max_worsening": MAX_WORSENING, "unit": "fraction"}) for name in [*speeds, "tpot_p50_ms"]]
    return Items(items)
