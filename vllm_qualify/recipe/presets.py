"""Presets: accuracy tasks for a kind of model, asked as such a model is used. A recipe names one in place of the tasks.

A preset has no gates. `docs/accuracy.md` says which preset is for which model, and what each cannot see. The numbers of
questions are those of the tasks' own data, unless a task has more than a release needs.
"""

from typing import Any

# Stop texts of lm-eval's tasks are for completions. In a chat the model ends its turn itself, and a task's stop text would also
# cut it while it thinks.
_CHAT: dict[str, Any] = {"api": "chat", "stop": []}
_THINKS = _CHAT | {"sampling": "model", "max_gen_toks": 32768, "time_limit_s": 14400.0}

PRESETS: dict[str, list[dict[str, Any]]] = {
    # A model that continues texts. mmlu compares likelihoods.
    "base": [
        {"task": "gsm8k", "num_fewshot": 5, "num_questions": 1319, "max_gen_toks": 256},
        {"task": "mmlu", "num_fewshot": 5, "num_questions": 2000, "max_gen_toks": 256},
    ],
    # A model that answers in a few hundred tokens.
    "chat": [
        {"task": "gsm8k_platinum", "num_fewshot": 5, "num_questions": 1209, "max_gen_toks": 1024} | _CHAT,
        {"task": "mmlu_pro", "num_fewshot": 5, "num_questions": 2000, "max_gen_toks": 2048} | _CHAT,
        {"task": "ifeval", "num_fewshot": 0, "num_questions": 541, "max_gen_toks": 1280} | _CHAT,
    ],
    # A model that thinks first, in thousands of tokens, and answers differently each time.
    "reasoning": [
        {"task": "aime25", "num_fewshot": 0, "num_questions": 30, "samples_per_question": 8} | _THINKS,
        {"task": "gpqa_diamond_cot_zeroshot", "num_fewshot": 0, "num_questions": 198, "samples_per_question": 4} | _THINKS,
        {"task": "mmlu_pro", "num_fewshot": 5, "num_questions": 1000} | _THINKS,
    ],
    # A model that calls tools, by the server's own parser.
    "tools": [{"task": "bfcl", "num_fewshot": 0, "num_questions": 1240, "max_gen_toks": 2048} | _CHAT],
    # A model that sees pictures. Its tasks ask for a few words after some reasoning, or for a letter.
    "vision": [
        {"task": "chartqa", "num_fewshot": 0, "num_questions": 2000, "max_gen_toks": 1024} | _CHAT,
        {"task": "mmmu_val", "num_fewshot": 0, "num_questions": 900, "max_gen_toks": 1024} | _CHAT,
    ],
}


def with_presets(accuracy: object) -> object:
    """The entries of `accuracy` as they are written in a recipe, with the tasks of a preset in its place.

    What an entry says besides its preset is said of each of its tasks, but published scores stand by task. Raises ValueError
    if there is no such preset or task.
    """
    if not isinstance(accuracy, list):
        return accuracy
    return [task for entry in accuracy for task in _expand_entry(entry)]


def _expand_entry(entry: object) -> list[object]:
    if not isinstance(entry, dict) or "preset" not in entry:
        return [entry]
    own = dict(entry)
    name = own.pop("preset")
    if "task" in own:
        raise ValueError(f"an entry of accuracy has the preset {name!r} and a task: make two entries of it")
    if not isinstance(name, str) or name not in PRESETS:
        raise ValueError(f"there is no preset {name!r}: take {', '.join(PRESETS)}")
    published = own.pop("published", {})
    tasks = {task["task"]: task | own for task in PRESETS[name]}
    if not (isinstance(published, dict) and published.keys() <= tasks.keys()):
        raise ValueError(f"published scores beside a preset stand by its tasks: {', '.join(tasks)}")
    return [task | ({"published": published[each]} if each in published else {}) for each, task in tasks.items()]
