"""Questions with pictures, through the real lm-eval: what is sent, what is kept, and wrong files from outside."""

import base64
import hashlib
import io
import json
import random
import re
import struct
import textwrap
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import datasets
import lm_eval.tasks
import pytest
from PIL import Image

from infra.reference_vision import questions
from tests.builders.accuracy import (
    Replies,
    Row,
    ask_task,
    draw_picture,
    exam_row,
    picture_url,
    pictures_plan,
    read_rows,
    refuse_task,
)
from tests.fakes.openai_server import Book
from vllm_qualify.evidence.accuracy.answers import Answered
from vllm_qualify.evidence.accuracy.data import fetch
from vllm_qualify.evidence.accuracy.pictures import Pictures, UnusablePictureError
from vllm_qualify.evidence.accuracy.thinking import read_replies
from vllm_qualify.evidence.contract.capabilities.vision import SIGNATURE, _png_chunk
from vllm_qualify.recipe.loading import catalog_folder
from vllm_qualify.recipe.sampling import Sampling
from vllm_qualify.report.flips import excerpt_question


def chart(body: bytes, query: str, answer: str, form: str = "png") -> Row:
    return {"image": picture_url(body, form), "query": query, "label": [answer], "human_or_machine": 0}


def digest(body: bytes) -> str:
    return hashlib.sha256(body).hexdigest()


CHARTQA = Path(lm_eval.tasks.__file__).parent / "chartqa" / "chartqa.yaml"
RED, BLUE, GREEN = draw_picture("red"), draw_picture("blue", "JPEG"), draw_picture("green", "WEBP")
# Two questions differ by their picture alone.
CHARTS = [
    chart(RED, "How many bars?", "40"),
    chart(BLUE, "How many bars?", "40", "jpeg"),
    chart(GREEN, "Which bar?", "Peru", "webp"),
]
SAID = {
    digest(RED): "I see some.\nFinal Answer: 41",
    digest(BLUE): "I see some.\nFinal Answer: 43",
    digest(GREEN): "it is peru.",
}
# 41 is within 5 % of 40, and 43 is not. Only anywhere_accuracy reads a reply without a final answer.
SCORES = {"exact_match,none": [0, 0, 0], "relaxed_accuracy,none": [1, 0, 0], "anywhere_accuracy,none": [1, 0, 1]}


def scores(answered: Answered, names: Mapping[str, object]) -> dict[str, list[float]]:
    answers = sorted(answered.answers, key=lambda answer: answer.question)
    return {name: [answer.scores[name] for answer in answers] for name in names}


@pytest.fixture(scope="module")
def asked(tmp_path_factory: pytest.TempPathFactory) -> tuple[Answered, Path, Book]:
    """ChartQA's questions, each asked twice."""
    folder, book = tmp_path_factory.mktemp("charts"), Book(Replies(SAID), thinking={})
    sampled: dict[str, Any] = {"sampling": Sampling(temperature=0.5), "samples_per_question": 2}
    return *ask_task(pictures_plan(folder, CHARTS, **sampled), folder, book), book


def test_each_picture_is_sent_as_it_came_before_the_text_and_scored_as_by_hand(asked: tuple[Answered, Path, Book]) -> None:
    answered, _, book = asked
    twice = scores(answered, SCORES)
    assert [{name: values[at::2] for name, values in twice.items()} for at in (0, 1)] == [SCORES, SCORES]
    assert len(book.requests) == 6
    for request in book.requests:
        (message,) = request["messages"]
        picture, text = message["content"]
        assert message["role"] == "user"
        assert "\nAnalyze the image and question carefully" in text["text"]
        assert picture["image_url"]["url"] in {row["image"] for row in CHARTS}


def test_questions_that_differ_by_their_picture_have_seeds_and_replies_of_their_own(asked: tuple[Answered, Path, Book]) -> None:
    answered, folder, book = asked
    assert len({request["seed"] for request in book.requests}) == 6
    assert len({answer.prompt_hash for answer in answered.answers}) == 3
    for step in {answer.step for answer in answered.answers}:
        hashes = {answer.prompt_hash for answer in answered.answers if answer.step == step}
        assert {reply.prompt_hash for reply in read_replies(folder / step)} == hashes


def test_the_evidence_names_pictures_by_hash_and_size(asked: tuple[Answered, Path, Book]) -> None:
    _, folder, _ = asked
    for path in folder.rglob("*.json*"):
        assert "base64" not in path.read_text()
    (samples, *_) = sorted(folder.rglob("samples_*.jsonl"))
    rows = {row["doc_id"]: row for row in read_rows(samples)}
    named = f"picture of 40 x 30, sha256 {digest(BLUE)}"
    assert rows[1]["doc"]["image"] == named
    assert excerpt_question(rows[1], 2000).text == f"{named}\nHow many bars?"


def test_another_run_has_the_same_hashes(asked: tuple[Answered, Path, Book], tmp_path: Path) -> None:
    again, _ = ask_task(pictures_plan(tmp_path, CHARTS), tmp_path, Book(Replies(SAID)))
    one, other = (
        {(each.question, each.doc_hash, each.prompt_hash, each.target_hash) for each in answered.answers}
        for answered in (asked[0], again)
    )
    assert one == other


def test_a_group_of_exams_in_groups_has_all_pictures_of_its_questions(tmp_path: Path) -> None:
    """MMMU's own tasks. Its form names pictures in the text, one of them twice."""
    own = tmp_path / "tasks"
    own.mkdir()
    (own / "inner.yaml").write_text(json.dumps({"group": "inner", "task": ["mmmu_val_math"]}))
    means = {"aggregate_metric_list": [{"metric": "acc", "aggregation": "mean", "weight_by_size": True}]}
    (own / "outer.yaml").write_text(json.dumps({"group": "outer", "task": ["inner"]} | means))
    one, two = draw_picture("black"), draw_picture("white")
    rows = [
        exam_row(1, "Of <image 1> and <image 2>, how many are like <image 1>?", "B", one, two),
        exam_row(2, "How many are in <image 1>?", "A", two),
        exam_row(3, "What is in <image 1>?", "12", two, options="[]"),
    ]
    said = {
        digest(one) + digest(two) + digest(one): "(B)",
        digest(two) + "How many": "It must be (B).",
        digest(two) + "What is in": "So it is 12.",
    }
    answered, _ = ask_task(pictures_plan(tmp_path, rows, "outer", own), tmp_path, Book(Replies(said)))
    assert scores(answered, {"acc,none": []}) == {"acc,none": [1, 0, 1]}


def bomb() -> bytes:
    """A PNG of a few hundred bytes that says that it has 60,000 x 60,000 pixels."""
    head = struct.pack(">2I5B", 60_000, 60_000, 8, 2, 0, 0, 0)
    chunks = ((b"IHDR", head), (b"IDAT", zlib.compress(bytes(9000))), (b"IEND", b""))
    return SIGNATURE + b"".join(_png_chunk(kind, body) for kind, body in chunks)


def noise() -> bytes:
    file = io.BytesIO()
    Image.frombytes("RGB", (60, 60), random.Random(1).randbytes(60 * 60 * 3)).save(file, "PNG")
    return file.getvalue()


SVG = b"<svg xmlns='http://www.w3.org/2000/svg'/>"


@pytest.mark.parametrize(
    ("image", "message"),
    [
        (picture_url(bomb()), "question 2: a picture has 60,000 x 60,000 pixels, where 50,000,000 in all are allowed"),
        (picture_url(noise()[:4000]), "question 2: a picture cannot be decoded: "),
        (picture_url(SVG, "svg+xml"), "question 2: a picture is no PNG or JPEG or WEBP or GIF"),
        ("data:image/png;base64,####", "question 2: a picture is not in base64: "),
        ("data:image/png,abc", "question 2: the picture 'data:image/png' is not in base64"),
        ("/etc/passwd", "'/etc/passwd' stands where the task shows a picture"),
        ("http://127.0.0.1/secret.png", "'http://127.0.0.1/secret.png' stands where the task shows a picture"),
    ],
    ids=["bomb", "cut", "svg", "base64", "no base64", "path", "address"],
)
def test_a_picture_that_is_none_is_refused_with_its_place(image: str, message: str, tmp_path: Path) -> None:
    error = refuse_task(pictures_plan(tmp_path, [CHARTS[0], CHARTS[2] | {"image": image}]), tmp_path / "lm-eval")
    assert "chartqa cannot be asked: test.jsonl, " in str(error)
    assert message in str(error)
    assert "write it as `data:image/png;base64,…`" in (error.remedy or "")


def test_no_file_of_this_machine_becomes_a_picture(tmp_path: Path) -> None:
    (tmp_path / "mine.png").write_bytes(RED)
    for body in (None, "text"):
        question = {"image": {"bytes": body, "path": str(tmp_path / "mine.png")}}
        with pytest.raises(UnusablePictureError, match="question 1: a picture has no bytes, only a path or a text"):
            list(Pictures().taken_from([question]))


@pytest.mark.parametrize(
    ("rows", "settings", "message", "remedy"),
    [
        (CHARTS, {"api": "completions", "stop": None}, "chartqa has pictures, which only a chat can show", "set api to chat"),
        (CHARTS, {"num_fewshot": 1}, "chartqa has pictures, which lm-eval leaves out", "set num_fewshot to 0"),
        (
            [{"query": "?", "label": ["1"]}],
            {},
            "chartqa does not find its fields in test.jsonl: KeyError: 'image'",
            "JSON lines",
        ),
    ],
    ids=["completions", "shots", "no pictures"],
)
def test_what_a_task_with_pictures_cannot_be_is_refused(
    rows: list[Row], settings: dict[str, Any], message: str, remedy: str, tmp_path: Path
) -> None:
    plan = pictures_plan(tmp_path, rows, **settings)
    assert plan.questions
    error = refuse_task(plan.model_copy(update={"questions": [*plan.questions, *plan.questions]}), tmp_path / "lm-eval")
    assert message in str(error)
    assert remedy in (error.remedy or "")


def test_fetched_pictures_are_local_questions_with_the_same_hashes(tmp_path: Path) -> None:
    """The hub's form, which is parquet with the bytes of each file; a task's own files stand in for the hub."""
    rows = [row | {"image": {"bytes": body, "path": None}} for row, body in zip(CHARTS, (RED, BLUE, GREEN), strict=True)]
    features = datasets.Dataset.from_list([{**row, "image": None} for row in rows]).features
    data = datasets.Dataset.from_list(rows, features=datasets.Features({**features, "image": datasets.Image(decode=False)}))
    own = tmp_path / "tasks"
    own.mkdir()
    data.cast_column("image", datasets.Image()).to_parquet(own / "data.parquet")
    files = {"dataset_path": "parquet", "dataset_kwargs": {"data_files": {"test": str(own / "data.parquet")}}}
    (own / "chartqa.yaml").write_text(json.dumps({"include": str(CHARTQA), "task": "chartqa"} | files))
    plan = pictures_plan(tmp_path, CHARTS, own=own)
    assert fetch(plan.model_copy(update={"questions": None}), tmp_path / "fetched").questions == 3
    assert read_rows(tmp_path / "fetched" / "test.jsonl") == CHARTS


def pixels(image: str) -> bytes:
    with Image.open(io.BytesIO(base64.b64decode(image.partition(",")[2]))) as picture:
        return bytes(picture.convert("RGB").tobytes())


def test_the_vision_models_questions_are_what_its_code_draws() -> None:
    kept = read_rows(catalog_folder() / "reference-vision" / "charts.jsonl")
    drawings = [(asked.pictures[0].tobytes(), asked.query, [asked.answer]) for asked in questions.written()]
    assert [(pixels(row["image"]), row["query"], row["label"]) for row in kept] == drawings
    assert len({picture for picture, _, _ in drawings}) == 400


def test_the_vision_model_learned_the_prompt_of_chartqa() -> None:
    (text,) = re.findall(r"doc_to_text: \|\n(.*?)\ndoc_to_target", CHARTQA.read_text(), re.DOTALL)
    learned = questions.prompt(questions.Asked([Image.new("RGB", (1, 1))], "{{query}}", ""))
    assert textwrap.dedent(text) == learned.removesuffix("\n")
