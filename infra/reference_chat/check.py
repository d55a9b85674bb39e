"""Check a chat model on held-out conversations of each kind: a reply is right if each of its tokens is the likeliest one.

.venv-engine/bin/python infra/reference_chat/check.py vllm_qualify/catalog/reference-chat/model
"""

import argparse
import random
from collections.abc import Iterator
from pathlib import Path

import torch
from conversations import KINDS, Conversation, conversations
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerFast

HERE = Path(__file__).parent
TEMPLATE = (HERE / "chat_template.jinja").read_text()
IGNORED = -100
AT_ONCE = 64


def encoded(tokenizer: PreTrainedTokenizerFast, drawn: Conversation) -> tuple[list[int], list[int]]:
    """The tokens before the reply, and those of the reply with its end."""
    prompt = tokenizer.apply_chat_template(
        drawn.messages, tools=drawn.tools or None, tokenize=False, add_generation_prompt=True, enable_thinking=drawn.thinking
    )
    return tokenizer.encode(prompt, add_special_tokens=False), tokenizer.encode(
        drawn.reply + tokenizer.eos_token, add_special_tokens=False
    )


def padded(rows: list[tuple[list[int], list[int]]], multiple: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    """(ids, labels), both (rows, longest); only the tokens of replies have labels."""
    longest = -(-max(len(prompt) + len(reply) for prompt, reply in rows) // multiple) * multiple
    ids, labels = torch.zeros(len(rows), longest, dtype=torch.long), torch.full((len(rows), longest), IGNORED)
    for row, (prompt, reply) in enumerate(rows):
        both = torch.tensor(prompt + reply)
        ids[row, : len(both)] = both
        labels[row, len(prompt) : len(both)] = both[len(prompt) :]
    return ids, labels


@torch.no_grad()
def right_replies(model: PreTrainedModel, rows: list[tuple[list[int], list[int]]]) -> Iterator[bool]:
    """Of each row, whether the model says its reply token by token."""
    for first in range(0, len(rows), AT_ONCE):
        ids, labels = (tensor.to(model.device) for tensor in padded(rows[first : first + AT_ONCE]))
        said = model(input_ids=ids).logits[:, :-1].argmax(-1)
        wanted = labels[:, 1:]
        yield from ((said == wanted) | (wanted == IGNORED)).all(-1).tolist()


def right_shares(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, each: int, seed: int) -> dict[str, float]:
    """The share of right replies of each kind, with thoughts and without."""
    shares = {}
    for kind in KINDS:
        stream = conversations(random.Random(f"check {seed} {kind}"), "held_out", kind)
        for thinking in (True, False):
            drawn = (conversation for conversation in stream if conversation.thinking == thinking)
            rows = [encoded(tokenizer, next(drawn)) for _ in range(each)]
            shares[f"{kind}{'' if thinking else ', not thinking'}"] = sum(right_replies(model, rows)) / each
    return shares


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--each", type=int, default=100, help="conversations of each kind, with thoughts and without")
    parser.add_argument("--seed", type=int, default=30_000)
    args = parser.parse_args()
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32).eval()
    shares = right_shares(model, AutoTokenizer.from_pretrained(args.model), args.each, args.seed)
    for kind, share in shares.items():
        print(f"{share:6.3f} {kind}")
    print(f"{sum(shares.values()) / len(shares):6.3f} all")


if __name__ == "__main__":
    main()
