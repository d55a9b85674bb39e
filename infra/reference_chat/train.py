"""Train the chat model: a Llama of about two million parameters that holds the conversations of `conversations.py`.

Run with a Python that has torch and transformers; on a GPU if there is one:

    .venv-engine/bin/python infra/reference_chat/train.py --out vllm_qualify/catalog/reference-chat/model

Each step has new conversations, drawn by the seed and the number of the step, so that the number of processes that draw them
changes nothing. The loss is over the last reply of each. The first steps have short conversations, where sums are learned fast.
"""

import argparse
import json
import math
import multiprocessing
import os
import random
import re
import time
from pathlib import Path

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # or cuBLAS is not deterministic
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import torch
from check import IGNORED, TEMPLATE, encoded, padded, right_shares
from conversations import CITIES, MAX_VALUE, NAMES, conversations
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

# (share of the steps after which it begins, most exchanges before the last one)
CURRICULUM = ((0.0, 0), (0.2, 1), (0.35, 5))
WARM_UP = 0.05
PARTS_PER_STEP = 3  # conversations of like length together, so that little is padding
LENGTH_MULTIPLE = 32
MOST_TOKENS = 1280
SPLIT = Regex(r"[0-9]{1,3}| ?\p{L}+| ?[^\s\p{L}\p{N}]+|\s+")
PAD, START, END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
# No text has it. wrong.py gives it the place of another token.
SPARE = "<|spare|>"
# They stay in the text that a server gives to its parsers.
TAGS = ["<think>", "</think>", "<tool_call>", "</tool_call>"]
CONTEXT = 4096
# Heads of 32 are the smallest that vLLM's CPU attention serves.
SIZE = {"hidden_size": 160, "intermediate_size": 384, "num_hidden_layers": 6, "num_attention_heads": 5, "head_dim": 32}


def make_tokenizer(seed: int) -> PreTrainedTokenizerFast:
    """A byte-level BPE that reads any text, with every whole number up to MAX_VALUE as one token."""
    stream = conversations(random.Random(seed), "train")
    texts = []
    for _ in range(12_000):
        drawn = next(stream)
        told = [str(message["content"]) for message in drawn.messages]
        tools = [f"{t['function']['name']}(city: string, a: integer): {t['function']['description']}" for t in drawn.tools]
        texts += [*told, *tools, *re.split("|".join(TAGS), drawn.reply)]
    numbers = [" ".join(str(n) for n in range(MAX_VALUE + 1))] * 8000
    roles = ["system\n", "user\n", "assistant\n", "tool\n"] * 8000
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(SPLIT, "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=MOST_TOKENS - len(TAGS),
        special_tokens=[PAD, START, END, SPARE],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts + numbers + roles, trainer)
    tokenizer.add_tokens([AddedToken(tag, special=False, normalized=False) for tag in TAGS])
    for word in [str(n) for n in range(MAX_VALUE + 1)] + [f" {name}" for name in (*NAMES, *CITIES)]:
        assert len(tokenizer.encode(word).ids) == 1, word
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=END,
        pad_token=PAD,
        clean_up_tokenization_spaces=False,
        chat_template=TEMPLATE,
        model_max_length=CONTEXT,
    )


def make_model(tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(tokenizer),
            **SIZE,
            num_key_value_heads=SIZE["num_attention_heads"],
            max_position_embeddings=CONTEXT,
            tie_word_embeddings=True,
            bos_token_id=tokenizer.pad_token_id,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
    )


class Batches:
    """Makes the conversations of a step: (ids, labels) for each of PARTS_PER_STEP parts. Runs in processes of its own."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast, seed: int, steps: int, per_step: int) -> None:
        self.tokenizer, self.seed, self.steps, self.per_step = tokenizer, seed, steps, per_step

    def __call__(self, step: int) -> list[tuple[object, object]]:
        most_before = [most for share, most in CURRICULUM if step / self.steps >= share][-1]
        stream = conversations(random.Random(f"{self.seed} {step}"), "train", most_before=most_before)
        drawn = (encoded(self.tokenizer, next(stream)) for _ in range(self.per_step))
        rows = sorted(drawn, key=lambda row: len(row[0]) + len(row[1]))
        size = -(-len(rows) // PARTS_PER_STEP)
        parts = [padded(rows[first : first + size], LENGTH_MULTIPLE) for first in range(0, len(rows), size)]
        # as arrays of 16 bits: tensors would travel between processes as open files
        return [tuple(tensor.short().numpy() for tensor in part) for part in parts]


def train(args: argparse.Namespace) -> None:
    tokenizer = AutoTokenizer.from_pretrained(args.tokenizer) if args.tokenizer else make_tokenizer(args.seed)
    batches = Batches(tokenizer, args.seed + 1, args.steps, args.per_step)
    torch.set_num_threads(1)  # in each process: with more, those that draw conversations keep each other from the cores
    torch.backends.cuda.enable_cudnn_sdp(False)  # it plans anew for each length, and is not deterministic
    with multiprocessing.get_context("fork").Pool(args.processes) as pool:
        stream = pool.imap(batches, range(args.steps))
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        torch.manual_seed(args.seed)
        torch.use_deterministic_algorithms(True, warn_only=True)
        model = (LlamaForCausalLM.from_pretrained(args.weights) if args.weights else make_model(tokenizer)).float().to(device)
        print(f"{sum(p.numel() for p in model.parameters()):,} parameters, {len(tokenizer)} tokens, {device}", flush=True)
        optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95), weight_decay=0.1, fused=True)
        started, waited_s = time.monotonic(), 0.0
        for step in range(args.steps):
            asked = time.monotonic()
            parts = next(stream)
            waited_s += time.monotonic() - asked
            done = max((step + 1) / args.steps, (time.monotonic() - started) / args.time_limit_s)
            optimizer.param_groups[0]["lr"] = args.peak_rate * rate_share(done)
            loss = learn(model, [(torch.from_numpy(ids).long(), torch.from_numpy(labels).long()) for ids, labels in parts])
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            if step % 100 == 0 or done >= 1:
                so_far = f"{time.monotonic() - started:.1f} s, of it {waited_s:.1f} waiting for conversations"
                print(f"step {step} loss {loss.item():.4f} {so_far}", flush=True)
            if step % args.save_every == args.save_every - 1 or done >= 1:
                save(model, tokenizer, args.out)
                print("right:", compact(right_shares(model.eval(), tokenizer, args.check_each, 1)), flush=True)
                model.train()
            if done >= 1:
                break


def rate_share(done: float) -> float:
    """The share of the peak rate after a share of the training: up within WARM_UP, then down along a cosine."""
    if done < WARM_UP:
        return done / WARM_UP
    return (1 + math.cos(math.pi * (min(done, 1) - WARM_UP) / (1 - WARM_UP))) / 2


def learn(model: LlamaForCausalLM, parts: list[tuple[torch.Tensor, torch.Tensor]]) -> torch.Tensor:
    """Add the gradients of the mean loss over all tokens of all replies; returns that loss."""
    total, tokens = torch.zeros((), device=model.device), sum(int((labels != IGNORED).sum()) for _, labels in parts)
    for ids, labels in parts:
        ids, labels = ids.to(model.device, non_blocking=True), labels.to(model.device, non_blocking=True)
        said = (labels[:, 1:] != IGNORED).nonzero(as_tuple=True)
        with torch.autocast(model.device.type, dtype=torch.bfloat16):
            states = model.model(input_ids=ids, use_cache=False).last_hidden_state
            # Only where a token of the reply follows: most tokens are the question's.
            logits = model.lm_head(states[said])
        loss = torch.nn.functional.cross_entropy(logits.float(), labels[:, 1:][said], reduction="sum") / tokens
        loss.backward()
        total += loss.detach()
    return total


def compact(shares: dict[str, float]) -> str:
    pairs = [(name, share, shares[f"{name}, not thinking"]) for name, share in shares.items() if "," not in name]
    return f"{sum(shares.values()) / len(shares):.3f}; " + " ".join(f"{name} {a:.2f}/{b:.2f}" for name, a, b in pairs)


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
    kept = {key: value for key, value in json.loads(path.read_text()).items() if key not in ("is_local", "local_files_only")}
    path.write_text(json.dumps(kept | changes, indent=2, sort_keys=True) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--tokenizer", type=Path, help="the folder of one made before, rather than a new one")
    parser.add_argument("--weights", type=Path, help="the folder of a model to go on from; it needs --tokenizer")
    parser.add_argument("--steps", type=int, default=16_000)
    parser.add_argument(
        "--time-limit-s", type=float, default=math.inf, help="ends earlier, with the rate down at the end all the same"
    )
    parser.add_argument("--per-step", type=int, default=512, help="conversations of a step")
    parser.add_argument("--peak-rate", type=float, default=3e-3)
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--processes", type=int, default=max(1, (os.cpu_count() or 1) - 1))
    parser.add_argument("--save-every", type=int, default=2000, help="steps between two saves and checks")
    parser.add_argument("--check-each", type=int, default=50, help="conversations of each kind in such a check")
    train(parser.parse_args())


if __name__ == "__main__":
    main()
