"""Questions about drawn pictures, in ChartQA's form, and sums without a picture, in gsm8k's.

    .venv-engine/bin/python infra/reference_vision/questions.py vllm_qualify/catalog/reference-vision

writes the recipe's questions. Training has other seeds, and leaves out each picture that is written here.
"""

import argparse
import base64
import io
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from PIL import Image, ImageDraw

SIDE_PX = 64
COLOURS = {
    "red": (255, 0, 0),
    "blue": (0, 0, 255),
    "green": (0, 128, 0),
    "yellow": (255, 255, 0),
    "black": (0, 0, 0),
    "purple": (160, 32, 240),
}
WRITTEN_SEED = 2024
CHARTS, PROMPTS = 400, 128
# What lm-eval's task chartqa asks after each question.
INSTRUCTION = """
Analyze the image and question carefully, using step-by-step reasoning.
First, describe any image provided in detail. Then, present your reasoning. And finally your final answer in this format:
Final Answer: <answer>
where <answer> follows the following instructions:
- <answer> should should be a single phrase or number.
- <answer> should not paraphrase or reformat the text in the image.
- If <answer> is a ratio, it should be a decimal value like 0.25 instead of 1:4.
- If the question is a Yes/No question, <answer> should be Yes/No.
- If <answer> is a number, it should not contain any units.
- If <answer> is a percentage, it should include a % sign.
- If <answer> is an entity, it should include the full label from the graph.
IMPORTANT: Remember, to end your answer with Final Answer: <answer>.
"""
# What the contract's checks of pictures ask.
ONE, TWO = "Which colour is this picture? Answer with one word.", "Which colours do these two pictures have?"


class Asked(NamedTuple):
    """A question with its pictures, and the answer. In the prompt, `<image>` stands for each picture."""

    pictures: list[Image.Image]
    query: str
    answer: str

    @property
    def key(self) -> bytes:
        """What of it is never in training, if the recipe asks it."""
        return b"".join(picture.tobytes() for picture in self.pictures)


def chart(draw: random.Random) -> Asked:
    return draw.choice((_bars, _bars, _squares))(draw)


def plain(draw: random.Random) -> Asked:
    """One picture of one colour or two, as the contract asks."""
    colours = draw.choices(list(COLOURS), k=draw.choice((1, 2)))
    pictures = [Image.new("RGB", (SIDE_PX, SIDE_PX), COLOURS[colour]) for colour in colours]
    return Asked(pictures, ONE if len(colours) == 1 else TWO, " and ".join(colours))


def addition(one: int, other: int) -> Asked:
    return Asked([], f"What is {one} plus {other}?", str(one + other))


def prompt(asked: Asked) -> str:
    """The message as the engine's template gets it: from lm-eval's chartqa and gsm8k, or from the contract."""
    if not asked.pictures:
        return f"Question: {asked.query}\nAnswer:"
    if asked.query in (ONE, TWO):
        return "<image>\n" * len(asked.pictures) + asked.query
    return f"<image>{asked.query}{INSTRUCTION}"


def reply(asked: Asked) -> str:
    if not asked.pictures:
        return f"#### {asked.answer}"
    return asked.answer if asked.query in (ONE, TWO) else f"Final Answer: {asked.answer}"


def _bars(draw: random.Random) -> Asked:
    """Two to five bars, whose heights differ by 8 pixels or more."""
    colours = draw.sample(list(COLOURS), draw.randint(2, 5))
    heights = draw.sample(range(8, SIDE_PX, 8), len(colours))
    picture = Image.new("RGB", (SIDE_PX, SIDE_PX), "white")
    pen = ImageDraw.Draw(picture)
    width = SIDE_PX // len(colours)
    for place, (colour, height) in enumerate(zip(colours, heights, strict=True)):
        left = place * width + 2
        pen.rectangle((left, SIDE_PX - height, left + width - 5, SIDE_PX - 1), COLOURS[colour])
    by_height = sorted(zip(heights, colours, strict=True))
    queries = {
        "Which bar is highest?": by_height[-1][1],
        "Which bar is lowest?": by_height[0][1],
        "How many bars are there?": str(len(colours)),
    }
    query = draw.choice(list(queries))
    return Asked([picture], query, queries[query])


def _squares(draw: random.Random) -> Asked:
    """One to six squares of one colour, in nine places."""
    count, colour = draw.randint(1, 6), draw.choice(list(COLOURS))
    picture = Image.new("RGB", (SIDE_PX, SIDE_PX), "white")
    pen = ImageDraw.Draw(picture)
    for place in draw.sample(range(9), count):
        left, top = 5 + place % 3 * 20, 5 + place // 3 * 20
        pen.rectangle((left, top, left + 12, top + 12), COLOURS[colour])
    queries = {"How many squares are there?": str(count), "Which colour are the squares?": colour}
    query = draw.choice(list(queries))
    return Asked([picture], query, queries[query])


def written() -> Iterator[Asked]:
    """The recipe's charts: no picture twice."""
    draw, seen = random.Random(WRITTEN_SEED), set[bytes]()
    while len(seen) < CHARTS:
        asked = chart(draw)
        if asked.key not in seen:
            seen.add(asked.key)
            yield asked


def _row(asked: Asked) -> dict[str, object]:
    file = io.BytesIO()
    asked.pictures[0].save(file, "PNG", optimize=True)
    url = f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"
    return {"image": url, "query": asked.query, "label": [asked.answer], "human_or_machine": 0}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder
    sums = [addition(one, other) for one in range(10) for other in range(10)]
    pairs = random.Random(WRITTEN_SEED).sample(range(len(sums) ** 2), PROMPTS)
    rows = {
        "charts": map(_row, written()),
        "sums": ({"question": asked.query, "answer": reply(asked)} for asked in sums),
        # A load's prompts must differ. Two sums in one are answered with text, which random tokens are not.
        "load": ({"prompt": f"Question: {sums[pair // 100].query} {sums[pair % 100].query}\nAnswer:"} for pair in pairs),
    }
    for name, lines in rows.items():
        (folder / f"{name}.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))


if __name__ == "__main__":
    main()
