"""Train the model that sees: a tower, a connector and a Llama of about half a million parameters in all.

    nice .venv-engine/bin/python infra/reference_vision/train.py --out vllm_qualify/catalog/reference-vision/model

It runs on a GPU if there is one. The architecture is Idefics3, one of the few that vLLM's CPU build serves without torchvision.
Each step has new pictures, drawn by the seed. The loss is over the reply.
"""

import argparse
import json
import math
import os
import random
import time
from itertools import islice
from pathlib import Path

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import numpy as np
import torch
from questions import COLOURS, INSTRUCTION, ONE, SIDE_PX, TWO, Asked, addition, chart, plain, prompt, reply, written
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    Idefics3Config,
    Idefics3ForConditionalGeneration,
    Idefics3ImageProcessorPil,
    Idefics3Processor,
    PreTrainedTokenizerFast,
)

PAD, START, END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
AROUND, GLOBAL, IMAGE = "<fake_token_around_image>", "<global-img>", "<image>"
PATCH_PX, SHUFFLE, CONTEXT, IGNORED = 8, 2, 256, -100
IMAGE_TOKENS = (SIDE_PX // PATCH_PX // SHUFFLE) ** 2
SHOWN = f"{AROUND}{GLOBAL}{IMAGE * IMAGE_TOKENS}{AROUND}"
# Of a step's questions.
SHARE_OF_SUMS, SHARE_OF_PLAIN = 0.1, 0.1
WARM_UP = 0.05
TEMPLATE = Path(__file__).parent / "chat_template.jinja"


def make_tokenizer() -> PreTrainedTokenizerFast:
    """A byte-level BPE that reads any text. A line of chartqa's instruction is one token: it says nothing that differs."""
    draw = random.Random(0)
    texts = [f"{prompt(each)} {reply(each)}".replace(INSTRUCTION, "") for each in islice(_drawn(draw), 2000)]
    texts += [ONE, TWO, *(f" {colour}" for colour in COLOURS)] * 100
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=352,
        special_tokens=[PAD, START, END, AROUND, GLOBAL, IMAGE, "<end_of_utterance>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_tokens([AddedToken(line, special=False, normalized=False) for line in INSTRUCTION.split("\n") if line])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=END, pad_token=PAD, clean_up_tokenization_spaces=False, model_max_length=CONTEXT
    )


def make_processor() -> Idefics3Processor:
    images = Idefics3ImageProcessorPil(
        size={"longest_edge": SIDE_PX}, max_image_size={"longest_edge": SIDE_PX}, do_image_splitting=False
    )
    return Idefics3Processor(images, make_tokenizer(), image_seq_len=IMAGE_TOKENS, chat_template=TEMPLATE.read_text())


def make_model(tokenizer: PreTrainedTokenizerFast) -> Idefics3ForConditionalGeneration:
    # Heads of 32 are the smallest that vLLM's CPU attention serves.
    ends = {
        "bos_token_id": tokenizer.pad_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    tower = {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "image_size": SIDE_PX,
        "patch_size": PATCH_PX,
    }
    text = {
        "model_type": "llama",
        "vocab_size": len(tokenizer),
        "hidden_size": 96,
        "intermediate_size": 256,
        "num_hidden_layers": 3,
        "num_attention_heads": 3,
        "num_key_value_heads": 3,
        "head_dim": 32,
        "max_position_embeddings": CONTEXT,
        "tie_word_embeddings": True,
    }
    config = Idefics3Config(
        vision_config=tower,
        text_config=text | ends,
        image_token_id=tokenizer.convert_tokens_to_ids(IMAGE),
        scale_factor=SHUFFLE,
        tie_word_embeddings=True,
        pad_token_id=tokenizer.pad_token_id,
    )
    return Idefics3ForConditionalGeneration(config)


def _drawn(draw: random.Random):
    while True:
        kind = draw.random()
        if kind < SHARE_OF_SUMS:
            yield addition(draw.randrange(10), draw.randrange(10))
        elif kind < SHARE_OF_SUMS + SHARE_OF_PLAIN:
            yield plain(draw)
        else:
            yield chart(draw)


def said(asked: Asked) -> str:
    return f"{START}user\n{prompt(asked).replace(IMAGE, SHOWN)}{END}\n{START}assistant\n"


def batch(tokenizer: PreTrainedTokenizerFast, many: list[Asked]) -> dict[str, torch.Tensor]:
    """Ids, labels and pictures. The rows are padded at their ends, and have room for two pictures each."""
    rows = []
    for asked in many:
        before = tokenizer(said(asked), add_special_tokens=False).input_ids
        after = tokenizer(f"{reply(asked)}{END}", add_special_tokens=False).input_ids
        rows.append((before + after, [IGNORED] * len(before) + after))
    length = max(len(ids) for ids, _ in rows)
    ids = torch.tensor([ids + [tokenizer.pad_token_id] * (length - len(ids)) for ids, _ in rows])
    labels = torch.tensor([labels + [IGNORED] * (length - len(labels)) for _, labels in rows])
    return {"input_ids": ids, "labels": labels, "pictures": pixels([each for asked in many for each in asked.pictures])}


def pixels(pictures: list) -> torch.Tensor:
    """Pictures as the processor makes them: RGB between -1 and 1."""
    if not pictures:
        return torch.zeros(0, 3, SIDE_PX, SIDE_PX)
    return torch.from_numpy(np.stack([np.asarray(each) for each in pictures])).permute(0, 3, 1, 2).float() / 127.5 - 1


def states(model: Idefics3ForConditionalGeneration, ids: torch.Tensor, pictures: torch.Tensor) -> torch.Tensor:
    """The last hidden states. All pictures pass the tower at once, in the order in which their places come."""
    embeds = model.get_input_embeddings()(ids)
    if len(pictures):
        seen = model.model.vision_model(pixel_values=pictures).last_hidden_state
        seen = model.model.connector(seen).flatten(0, 1)
        embeds = embeds.masked_scatter((ids == model.config.image_token_id)[..., None], seen)
    return model.model.text_model(inputs_embeds=embeds, use_cache=False).last_hidden_state


def learn(model: Idefics3ForConditionalGeneration, part: dict[str, torch.Tensor]) -> torch.Tensor:
    part = {name: tensor.to(model.device) for name, tensor in part.items()}
    hidden, labels = states(model, part["input_ids"], part["pictures"]), part["labels"]
    places = (labels[:, 1:] != IGNORED).nonzero(as_tuple=True)
    loss = torch.nn.functional.cross_entropy(model.lm_head(hidden[places]), labels[:, 1:][places])
    loss.backward()
    return loss.detach()


@torch.no_grad()
def right(model: Idefics3ForConditionalGeneration, tokenizer: PreTrainedTokenizerFast, many: list[Asked]) -> list[bool]:
    """Which replies would be right, token by token."""
    part = {name: tensor.to(model.device) for name, tensor in batch(tokenizer, many).items()}
    guessed = model.lm_head(states(model, part["input_ids"], part["pictures"]))[:, :-1].argmax(-1)
    labels = part["labels"][:, 1:]
    return ((guessed == labels) | (labels == IGNORED)).all(1).tolist()


def train(args: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(args.seed)
    processor = make_processor()
    tokenizer, kept = processor.tokenizer, list(written())
    held = {asked.key for asked in kept}
    draw = random.Random(args.seed)
    stream = (asked for asked in _drawn(draw) if not asked.pictures or asked.key not in held)
    model = make_model(tokenizer).to("cuda" if torch.cuda.is_available() else "cpu")
    print(f"{sum(p.numel() for p in model.parameters()):,} parameters, {len(tokenizer)} tokens", flush=True)
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.98), weight_decay=0.05, fused=True)
    started = time.monotonic()
    for step in range(args.steps):
        optimizer.param_groups[0]["lr"] = args.peak_rate * rate_share(step / args.steps)
        loss = learn(model, batch(tokenizer, list(islice(stream, args.per_step))))
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step % 100 == 99 or step == args.steps - 1:
            shares = " ".join(f"{name} {share:.3f}" for name, share in checked(model, tokenizer, kept).items())
            print(f"step {step + 1} loss {loss:.4f} {time.monotonic() - started:.0f} s: {shares}", flush=True)
    save(model, processor, args.out)


def checked(
    model: Idefics3ForConditionalGeneration, tokenizer: PreTrainedTokenizerFast, charts: list[Asked]
) -> dict[str, float]:
    """The share of right replies by the kind of question: of charts that training never has, and of all sums."""
    kinds: dict[str, list[Asked]] = {"sums": [addition(one, other) for one in range(10) for other in range(10)]}
    for asked in charts:
        kinds.setdefault(asked.query.removesuffix("?"), []).append(asked)
    kinds["plain"] = [plain(random.Random(number)) for number in range(20)]
    return {kind: sum(right(model, tokenizer, many)) / len(many) for kind, many in kinds.items()}


def rate_share(done: float) -> float:
    """The share of the peak rate after a share of the training: up within WARM_UP, then down along a cosine."""
    if done < WARM_UP:
        return done / WARM_UP
    return (1 + math.cos(math.pi * (done - WARM_UP) / (1 - WARM_UP))) / 2


def save(model: Idefics3ForConditionalGeneration, processor: Idefics3Processor, out: Path) -> None:
    model.to(torch.bfloat16).save_pretrained(out)
    processor.save_pretrained(out)
    config = out / "tokenizer_config.json"
    kept = {
        name: value for name, value in json.loads(config.read_text()).items() if name not in ("is_local", "local_files_only")
    }
    changed = kept | {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": CONTEXT}
    config.write_text(json.dumps(changed, indent=2, sort_keys=True) + "\n")
    (out / "model.safetensors").chmod(0o644)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=6000)
    parser.add_argument("--per-step", type=int, default=64, help="questions of a step")
    parser.add_argument("--peak-rate", type=float, default=2e-3)
    parser.add_argument("--seed", type=int, default=7)
    train(parser.parse_args())


if __name__ == "__main__":
    main()
