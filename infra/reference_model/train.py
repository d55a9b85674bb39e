"""Train the reference model: a Llama of about 1.2 million parameters that answers the problems of `problems.py`, 5-shot.

Run with the engine environment's Python, which has torch and transformers:

    .venv-engine/bin/python infra/reference_model/train.py --out vllm_qualify/catalog/reference/model

Its draft model, for speculative decoding, is smaller, and was trained in the same way but not as long:

    .venv-engine/bin/python infra/reference_model/train.py --size draft --steps 1000 --peak-rate 4e-3 \\
        --out vllm_qualify/catalog/reference/draft

Every training sequence is laid out as lm-eval lays out gsm8k's few-shot prompt (`Question: …\\nAnswer: …`, blank line between).
Training begins with one problem in each sequence, where the arithmetic is learned fast. Most of its steps have six, so that
the model is trained at the length at which it is asked. The loss weighs answers over questions.
"""

import argparse
import json
import random
import time
from pathlib import Path

import torch
from problems import MAX_VALUE, NAMES, problems
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

PROBLEMS_PER_STEP = 48
# (share of the steps after which it begins, problems per sequence); six problems are a 5-shot prompt
CURRICULUM = ((0.0, 1), (0.35, 2), (0.45, 6))
QUESTION_LOSS_WEIGHT = 0.05
MOST_TOKENS = 896  # merging ends before, when nothing is left to merge
SPLIT = Regex(r"[0-9]{1,3}| ?\p{L}+| ?[^\s\p{L}\p{N}]+|\s+")
END = "</s>"
CONTEXT = 2048
SIZES = {
    "model": {"hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 5},
    "draft": {"hidden_size": 64, "intermediate_size": 192, "num_hidden_layers": 1},
}
# The smallest that vLLM's CPU attention serves.
HEAD_DIM = 32


def layout(shots: list[dict[str, str]]) -> list[tuple[str, str]]:
    """(question part, answer part) of each problem, in lm-eval's gsm8k layout; joined, they are the 5-shot prompt."""
    return [(f"Question: {p['question']}\nAnswer:", f" {p['answer']}\n\n") for p in shots]


def make_tokenizer(seed: int) -> PreTrainedTokenizerFast:
    """A byte-level BPE that reads any text, with every whole number of the problems as one token."""
    rng = random.Random(seed)
    stream = problems(rng, "train")
    texts = ["".join(q + a for q, a in layout([next(stream)])) for _ in range(4000)]
    numbers = [" ".join(str(n) for n in range(MAX_VALUE + 1))] * 4000
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(SPLIT, "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=MOST_TOKENS,
        special_tokens=["<s>", END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts + numbers, trainer)
    for word in [str(n) for n in range(MAX_VALUE + 1)] + [f" {name}" for name in NAMES]:
        assert len(tokenizer.encode(word).ids) == 1, word
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token=END, pad_token=END, clean_up_tokenization_spaces=False
    )


def batch_of(rng: random.Random, tokenizer: PreTrainedTokenizerFast, per_sequence: int) -> tuple[torch.Tensor, torch.Tensor]:
    """PROBLEMS_PER_STEP problems as (ids, weights), both (sequences, longest); padding has weight 0."""
    stream = problems(rng, "train")
    rows = []
    for _ in range(PROBLEMS_PER_STEP // per_sequence):
        ids: list[int] = []
        weights: list[float] = []
        for question, answer in layout([next(stream) for _ in range(per_sequence)]):
            for text, weight in ((question, QUESTION_LOSS_WEIGHT), (answer, 1.0)):
                part = tokenizer.encode(text, add_special_tokens=False)
                ids += part
                weights += [weight] * len(part)
        rows.append((ids, weights))
    longest = max(len(ids) for ids, _ in rows)
    pad = tokenizer.pad_token_id
    return (
        torch.tensor([ids + [pad] * (longest - len(ids)) for ids, _ in rows]),
        torch.tensor([weights + [0.0] * (longest - len(weights)) for _, weights in rows]),
    )


def problems_per_sequence(progress: float) -> int:
    return [count for share, count in CURRICULUM if progress >= share][-1]


def make_model(tokenizer: PreTrainedTokenizerFast, size: str) -> LlamaForCausalLM:
    heads = SIZES[size]["hidden_size"] // HEAD_DIM
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(tokenizer),
            **SIZES[size],
            num_attention_heads=heads,
            num_key_value_heads=heads,
            head_dim=HEAD_DIM,
            max_position_embeddings=CONTEXT,
            tie_word_embeddings=True,
            bos_token_id=tokenizer.bos_token_id,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
    )


def loss_of(model: LlamaForCausalLM, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    logits = model(input_ids=ids).logits[:, :-1].float()
    each = torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="none")
    weight = weights[:, 1:].flatten()
    return (each * weight).sum() / weight.sum()


def train(out: Path, size: str, steps: int, peak_rate: float, seed: int) -> None:
    torch.manual_seed(seed)
    tokenizer = make_tokenizer(seed)
    model = make_model(tokenizer, size)
    print(f"{sum(p.numel() for p in model.parameters()):,} parameters, {len(tokenizer)} tokens")
    optimizer = torch.optim.AdamW(model.parameters(), lr=peak_rate, betas=(0.9, 0.95), weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, peak_rate, total_steps=steps, pct_start=0.05)
    rng = random.Random(seed + 1)
    started = time.monotonic()
    for step in range(steps):
        ids, weights = batch_of(rng, tokenizer, problems_per_sequence(step / steps))
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = loss_of(model, ids, weights)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if step % 50 == 0 or step == steps - 1:
            print(f"step {step} loss {loss.item():.4f} length {ids.shape[1]} {time.monotonic() - started:.0f} s", flush=True)
        if step % 250 == 249 or step == steps - 1:
            save(model, tokenizer, out)


def save(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, out: Path) -> None:
    half = LlamaForCausalLM(model.config)
    half.load_state_dict(model.state_dict())
    half.to(torch.bfloat16).save_pretrained(out)
    tokenizer.save_pretrained(out)
    # transformers 4 knows the class only by this name, transformers 5 by both names
    rewrite(out / "tokenizer_config.json", tokenizer_class="PreTrainedTokenizerFast", model_max_length=CONTEXT)
    rewrite(out / "config.json")
    (out / "model.safetensors").chmod(0o644)


def rewrite(path: Path, **changes: object) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes, indent=2, sort_keys=True) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--size", choices=SIZES, default="model")
    parser.add_argument("--steps", type=int, default=4000)
    parser.add_argument("--peak-rate", type=float, default=2e-3)
    parser.add_argument("--seed", type=int, default=7)
    args = parser.parse_args()
    train(args.out, args.size, args.steps, args.peak_rate, args.seed)


if __name__ == "__main__":
    main()
