"""Likelihoods: what the captured replies say, what is asked of a server, and that a bad reply is invalid."""

import copy
import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given as draw
from hypothesis import settings as examples
from hypothesis import strategies as st
from scipy import stats

from tests.builders.fake_servers import serving
from tests.evidence.commands import SERVER
from tests.fakes.vllm import Handler
from vllm_qualify.engine.server import Server
from vllm_qualify.errors import RecipeError
from vllm_qualify.evidence import likelihood, passages
from vllm_qualify.evidence.likelihood import Scored, measure_likelihood, per_token, read_scored, share_per_token
from vllm_qualify.evidence.measurement import UNUSABLE, Interval
from vllm_qualify.evidence.passages import Passage
from vllm_qualify.evidence.sequential import Sides

CAPTURED = Path(__file__).parent / "captured"
SCORES = CAPTURED / "likelihood" / "bf16"
Document = dict[str, Any]
Change = Callable[[list[Document]], object]
MODEL = "reference"


def answers_captured() -> list[Passage]:
    return passages._read_task(CAPTURED / "accuracy" / "gsm8k", "gsm8k")


def texts_captured() -> list[Passage]:
    return list(passages.read_texts((CAPTURED / "likelihood" / "given-texts.jsonl").read_bytes()))


def lines_of(file: str = likelihood.ANSWERS) -> list[Document]:
    return [json.loads(line) for line in (SCORES / file).read_text().splitlines()]


def read(path: Path, lines: list[Document], wanted: list[Passage] | None = None) -> list[Scored]:
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    return read_scored(path, answers_captured() if wanted is None else wanted, MODEL)


def places(line: Document) -> list[Document]:
    at_tokens: list[Document] = line["reply"]["choices"][0]["prompt_logprobs"]
    return at_tokens


# --- the captured replies


def test_the_answers_are_those_of_the_first_repetition_in_an_order_that_is_no_order() -> None:
    answers = answers_captured()
    numbers = [passage.number for passage in answers]
    assert len(set(numbers)) == len(numbers) == 8
    assert numbers != sorted(numbers)
    assert all(str(passage.prompt).startswith("Question: ") and passage.text.startswith(" ") for passage in answers)


def test_the_captured_answers_have_the_likelihoods_of_their_own_tokens(tmp_path: Path) -> None:
    lines = lines_of()
    answers = read(tmp_path / "answers.jsonl", lines)
    for line, scored in zip(lines, answers, strict=True):
        own = [at[str(token)]["logprob"] for token, at in zip(line["tokens"][line["begins"] :], places(line), strict=True)]
        assert scored.nll_nat == pytest.approx(-sum(own))
        assert "".join(at[str(token)]["decoded_token"] for token, at in zip(scored.tokens, places(line), strict=True)) in [
            passage.text for passage in answers_captured()
        ]
        # The model answered greedily: each of its tokens was the likeliest.
        assert scored.hits == len(scored.tokens)
        assert 0 <= scored.nll_nat < 0.1


def test_the_captured_texts_are_scored_from_their_second_token_on(tmp_path: Path) -> None:
    lines = lines_of(likelihood.TEXTS)
    texts = read(tmp_path / "texts.jsonl", lines, texts_captured())
    assert [len(scored.tokens) for scored in texts] == [len(line["tokens"]) - 1 for line in lines]
    # Names and numbers of questions are drawn at random.
    assert all(0.1 < scored.nll_nat / len(scored.tokens) < 0.3 and scored.hits < len(scored.tokens) for scored in texts)


def beside(own: Document, other: Document, key: str = "700", line: int = 0) -> Change:
    """Another token at a place, which is as the text's own but for its changes."""

    def change(lines: list[Document]) -> None:
        place = places(lines[line])[3]
        (of_text,) = place
        place[key] = place[of_text] | other
        place[of_text] |= own

    return change


def test_of_two_tokens_that_are_equally_likely_the_texts_own_is_the_likeliest(tmp_path: Path) -> None:
    lines = lines_of()
    for line, rank in ((0, 1), (1, 2)):
        beside({"logprob": -1.0, "rank": rank}, {"logprob": -1.0, "rank": 1}, line=line)(lines)
    assert all(scored.hits == len(scored.tokens) for scored in read(tmp_path / "answers.jsonl", lines))


# --- hostile replies


def setting(**changes: object) -> Change:
    """Changes of what the first text's fifth token has."""

    def change(lines: list[Document]) -> None:
        (entry,) = places(lines[0])[4].values()
        entry.update(changes)

    return change


def swap_replies(lines: list[Document]) -> None:
    lines[0]["reply"], lines[1]["reply"] = lines[1]["reply"], lines[0]["reply"]


def swap_texts(lines: list[Document]) -> None:
    """The server tokenizes one question as another, and scores that."""
    for key in ("tokens", "begins", "reply"):
        lines[0][key], lines[1][key] = lines[1][key], lines[0][key]


HOSTILE: dict[str, tuple[Change, str]] = {
    "a missing reply": (lambda lines: lines.pop(), "7 texts were scored, which are not the 8"),
    "a reply twice": (lambda lines: lines.append(lines[0]), "9 texts were scored"),
    "one text twice": (lambda lines: lines.__setitem__(1, lines[0]), "which are not the 8"),
    "another order": (lambda lines: lines.reverse(), "which are not the 8"),
    "replies swapped": (swap_replies, "the server counts|about other tokens|likelihoods"),
    "texts swapped": (swap_texts, "are not those of its text"),
    "another question": (lambda lines: lines[0].update(digest="0" * 64), "which are not the 8"),
    "a refusal": (lambda lines: lines[2].update(reply=None, problem="HTTP 500: oh"), "HTTP 500: oh"),
    "no reply": (lambda lines: lines[0].update(reply=None), "_Reply"),
    "another model": (lambda lines: lines[3]["reply"].update(model="other"), "of the model other, not reference"),
    "no choice": (lambda lines: lines[0]["reply"].update(choices=[]), "choices"),
    "two choices": (lambda lines: lines[0]["reply"]["choices"].append(lines[0]["reply"]["choices"][0]), "choices"),
    "no likelihoods": (lambda lines: lines[0]["reply"]["choices"][0].update(prompt_logprobs=None), "prompt_logprobs"),
    "too few": (lambda lines: places(lines[0]).pop(), "48 tokens and 47 likelihoods"),
    "too many": (lambda lines: places(lines[0]).append({}), "48 tokens and 49 likelihoods"),
    "a null": (lambda lines: lines[0]["reply"]["choices"][0]["prompt_logprobs"].__setitem__(5, None), "prompt_logprobs"),
    "an empty place": (lambda lines: places(lines[0]).__setitem__(5, {}), "about other tokens"),
    "NaN": (setting(logprob=math.nan), "logprob"),
    "minus infinity": (setting(logprob=-math.inf), "logprob"),
    "text for a number": (setting(logprob="-0.1"), "logprob"),
    "above zero": (setting(logprob=0.1), "logprob"),
    "below what vLLM writes": (setting(logprob=-10_000.0), "logprob"),
    "no rank": (setting(rank=None), "rank"),
    "a rank of 0": (setting(rank=0), "rank"),
    "no likeliest token": (setting(rank=2), "which token is the likeliest"),
    "likelier than the likeliest": (
        beside({"logprob": -0.1, "rank": 2}, {"logprob": -5.0, "rank": 1}),
        "likelihoods that cannot be",
    ),
    "more than certain": (beside({"logprob": -0.2, "rank": 2}, {"logprob": -0.1, "rank": 1}), "likelihoods that cannot be"),
    "other tokens": (lambda lines: lines[0]["tokens"].__setitem__(-1, 3), "about other tokens"),
    "an id that is none": (beside({"logprob": -12.0, "rank": 2}, {"rank": 1}, "0700"), "is no token id"),
    "another count of tokens": (lambda lines: lines[0]["reply"]["usage"].update(prompt_tokens=9), "the server counts 9"),
    "no text's tokens": (lambda lines: lines[0].update(begins=len(lines[0]["tokens"])), "0 tokens"),
    "a text that begins later": (lambda lines: lines[0].update(begins=lines[0]["begins"] + 1), "47 tokens and 48"),
    "a negative begin": (lambda lines: lines[0].update(begins=-1), "begins"),
    "a key that nobody wrote": (lambda lines: lines[0].update(more=1), "more"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_reply_is_refused_with_the_reason(name: str, tmp_path: Path) -> None:
    change, message = HOSTILE[name]
    lines = lines_of()
    change(lines)
    with pytest.raises(UNUSABLE, match=message):
        read(tmp_path / "answers.jsonl", lines)


def test_a_file_that_is_none_is_refused(tmp_path: Path) -> None:
    for content in ("", "\n", "[]\n", "{", "null\n"):
        (tmp_path / "answers.jsonl").write_text(content)
        with pytest.raises(UNUSABLE):
            read_scored(tmp_path / "answers.jsonl", answers_captured(), MODEL)


Path_ = tuple[str | int, ...]


def leaves(node: Any, way: Path_ = ()) -> Iterator[Path_]:
    """The place of each mapping, list and value."""
    yield way
    inside = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
    for key, value in inside:
        yield from leaves(value, (*way, key))


# Texts, because some of their tokens are not the likeliest.
LINES = lines_of(likelihood.TEXTS)
WAYS = [way for way in leaves(LINES) if way]
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-2, 800) | st.floats(-20, 5) | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
    max_leaves=3,
)


@pytest.mark.thorough
@examples(max_examples=500)
@draw(st.data())
def test_no_random_change_of_the_replies_leaves_another_measurement(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    """But for another possible likelihood, or another likeliest token beside the text's own: only the model knows these."""
    way = data.draw(st.sampled_from(WAYS))
    how, value = data.draw(st.sampled_from(["replaced", "removed", "renamed"])), data.draw(JSON)
    lines = copy.deepcopy(LINES)
    inside: Any = lines
    for step in way[:-1]:
        inside = inside[step]
    before = inside[way[-1]] if how == "replaced" else inside.pop(way[-1])
    if how == "replaced":
        inside[way[-1]] = value
    elif how == "renamed" and isinstance(inside, dict):
        inside[data.draw(st.sampled_from(["5", "700", " 5", "5.0", "", "more"]))] = before
    path = tmp_path_factory.mktemp("scores") / "texts.jsonl"
    wanted, unchanged = texts_captured(), read_scored(SCORES / likelihood.TEXTS, texts_captured(), MODEL)
    try:
        scores = read(path, lines, wanted)
    except UNUSABLE:
        return
    if how == "replaced" and way[-1] == "logprob":
        assert isinstance(value, float | int)
        assert -9999 <= value <= 0
        scores = [now._replace(nll_nat=then.nll_nat) for now, then in zip(scores, unchanged, strict=True)]
    elif how == "renamed":
        assert [now.hits for now in scores] == [then.hits for then in unchanged]
        scores = [now._replace(likeliest=then.likeliest) for now, then in zip(scores, unchanged, strict=True)]
    assert scores == unchanged


# --- what a server is asked


class ScoringHandler(Handler):
    """A server whose tokens are letters, but for `:A`, which is one."""

    most = 1000
    asked: list[tuple[str, Document]]
    refuses = ""
    ids: Document | None = None

    def do_POST(self) -> None:  # noqa: N802  # the name that the base class calls
        request = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self.asked.append((self.path, request))
        if self.path == self.refuses:
            self._refuse(400, "not here")
        elif self.path == "/tokenize":
            counted = {"tokens": tokens_of(text_of(request)), "max_model_len": self.most}
            self._answer(200, counted if self.ids is None else self.ids)
        else:
            self._answer(200, self._scored(request["prompt"]))

    def _scored(self, tokens: list[int]) -> Document:
        at: list[Any] = [{str(token): {"logprob": -0.5, "rank": 1, "decoded_token": piece(token)}} for token in tokens]
        choice = {"index": 0, "text": "x", "prompt_logprobs": [None, *at[1:]]}
        return {"model": MODEL, "choices": [choice], "usage": {"prompt_tokens": len(tokens)}}


BOTH = 999


def tokens_of(text: str) -> list[int]:
    return [ord(letter) for letter in text.replace(":A", chr(BOTH))]


def piece(token: int) -> str:
    return ":A" if token == BOTH else chr(token)


def text_of(request: Document) -> str:
    """A prompt, or a chat by a template of the server's own."""
    if "prompt" in request:
        return str(request["prompt"])
    said = "".join(f"<{message['role']}>{message['content']}" for message in request["messages"])
    return f"{said}<assistant>" if request["add_generation_prompt"] else said


@pytest.fixture(autouse=True)
def alive(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Server, "check_alive", lambda _: None)


def measured(path: Path, *passages_given: Passage, **behaviour: Any) -> tuple[list[Document], list[tuple[str, Document]]]:
    asked: list[tuple[str, Document]] = []
    with serving(type("Behaving", (ScoringHandler,), {"asked": asked, **behaviour})) as url:
        measure_likelihood(SERVER.model_copy(update={"url": url}), passages_given, path, 10.0, lambda *_: None)
    return [json.loads(line) for line in path.read_text().splitlines()], asked


@pytest.mark.parametrize(
    ("prompt", "text", "tokens", "scored_tokens"),
    [
        ("Q? ", "It is 7.", [*"Q? It is 7."], [*"It is 7."]),
        ("Q:", "A dog", ["Q", ":A", *" dog"], [":A", *" dog"]),
        ([{"role": "user", "content": "Who?"}], "Ada.", [*"<user>Who?<assistant>Ada."], [*"Ada."]),
        ("", "It is 7.", [*"It is 7."], [*"t is 7."]),
    ],
    ids=["answer", "token on both sides of the boundary", "chat by the server's own template", "text from its second token on"],
)
def test_only_the_tokens_of_the_text_count(
    prompt: str | passages.Messages, text: str, tokens: list[str], scored_tokens: list[str], tmp_path: Path
) -> None:
    passage = Passage("own", 7, prompt, text)
    (line,), asked = measured(tmp_path / "answers.jsonl", passage)
    (scored,) = read_scored(tmp_path / "answers.jsonl", [passage], MODEL)
    assert [piece(token) for token in line["tokens"]] == tokens
    assert line["begins"] == len(tokens) - len(scored_tokens)
    assert [piece(token) for token in scored.tokens] == scored_tokens
    assert scored.nll_nat == pytest.approx(0.5 * len(scored_tokens))
    path, request = asked[-1]
    assert (path, request["prompt"]) == ("/v1/completions", line["tokens"])
    assert (request["max_tokens"], request["prompt_logprobs"], request["temperature"]) == (1, 1, 0)


NO_IDS = [{}, {"tokens": [1.5], "max_model_len": 9}, {"tokens": ["a"], "max_model_len": 9}, {"tokens": [1]}]


@pytest.mark.parametrize(
    ("behaviour", "reason"),
    [
        *(({"ids": reply}, "Tokenized") for reply in NO_IDS),
        ({"refuses": "/tokenize"}, r"HTTP 400: .*not here"),
        ({"refuses": "/v1/completions"}, r"HTTP 400: .*not here"),
        ({"most": 8}, "question 0 of gsm8k has with its answer 8 tokens, and the server takes 8"),
    ],
    ids=str,
)
def test_scoring_ends_at_the_first_reply_that_is_none_which_is_the_reason(
    behaviour: Document, reason: str, tmp_path: Path
) -> None:
    given = [Passage("gsm8k", number, "", "It is 7.") for number in range(3)]
    lines, _ = measured(tmp_path / "answers.jsonl", *given, **behaviour)
    assert len(lines) == 1
    with pytest.raises(ValueError, match=reason):
        read_scored(tmp_path / "answers.jsonl", given, MODEL)


def test_a_server_that_does_not_answer_is_the_reason(tmp_path: Path) -> None:
    passages_given = [Passage("gsm8k", 1, "Q?", "A.")]
    server = SERVER.model_copy(update={"url": "http://127.0.0.1:9"})
    measure_likelihood(server, passages_given, tmp_path / "answers.jsonl", 5.0, lambda *_: None)
    with pytest.raises(ValueError, match="ConnectError"):
        read_scored(tmp_path / "answers.jsonl", passages_given, MODEL)


def test_a_text_that_is_too_long_is_the_recipes_error(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="the text of line 4 has 8 tokens, and the server takes 8") as raised:
        measured(tmp_path / "texts.jsonl", Passage("texts", 4, "", "It is 7."), most=8)
    assert raised.value.place == "likelihood.texts"


# --- which answers are scored


CHAT = [{"role": "user", "content": "Q?"}]


def sample(**changes: object) -> Document:
    arguments = {"gen_args_0": {"arg_0": "Q?", "arg_1": {"until": []}}}
    return {"doc_id": 1, "arguments": arguments, "resps": [["A."]]} | changes


@pytest.mark.parametrize(
    ("row", "prompts"),
    [
        (sample(), ["Q?"]),
        (sample(resps=[[" \n"]]), []),
        (sample(resps=[[None]]), []),
        (sample(arguments={"gen_args_0": {"arg_0": "Q?", "arg_1": " yes"}}, resps=[[-1.0, "False"]]), []),
        (sample(arguments={"gen_args_0": {"arg_0": [json.dumps(CHAT)], "arg_1": {}}}), [CHAT]),
    ],
    ids=["text", "empty", "null", "likelihoods", "chat"],
)
def test_only_replies_with_a_text_are_scored(row: Document, prompts: list[object], tmp_path: Path) -> None:
    (tmp_path / "r1-b1").mkdir()
    (tmp_path / "r1-b1" / "samples_own.jsonl").write_text(f"{json.dumps(row)}\n{json.dumps(row)}\n")
    assert [passage.prompt for passage in passages._read_task(tmp_path, "own")] == prompts


# --- intervals


def interval_per_token(totals: list[float], tokens: list[int], at: Sides) -> Interval:
    _, interval = per_token(totals, tokens, at)
    assert interval is not None
    return interval


def test_with_equal_lengths_the_bounds_are_those_of_a_mean() -> None:
    totals = [-1.5, 1.0, 3.5, 2.0, 0.0]
    interval = interval_per_token(totals, [10] * 5, Sides(0.05, 0.01))
    mean, error = np.mean(totals) / 10, stats.sem(totals) / 10
    assert per_token(totals, [10] * 5, Sides(0.05, 0.01))[0] == pytest.approx(mean)
    assert interval.lower == pytest.approx(mean + stats.t.ppf(0.05, 4) * error)
    assert interval.upper == pytest.approx(mean - stats.t.ppf(0.01, 4) * error)


def test_a_passage_that_changed_far_more_reaches_further_on_its_side() -> None:
    """Hall's t by hand: of 19 passages that did not change and one that did, the skew is 4.25 over the root of 20."""
    for sign in (1.0, -1.0):
        totals = [0.0] * 19 + [sign * 10.0]
        interval = interval_per_token(totals, [10] * 20, Sides(0.05, 0.05))
        error, skew = stats.sem(totals) / 10, sign * stats.skew(totals) * (19 / 20) ** 1.5 / 20**0.5
        far, near = (interval.upper, interval.lower) if sign > 0 else (interval.lower, interval.upper)
        t = (0.05 - sign * far) / error
        # Student's t with 19 degrees of freedom is 1.729 at 5 %.
        assert t + skew * t**2 / 3 + skew**2 * t**3 / 27 + skew / 6 == pytest.approx(-1.729, abs=1e-3)
        assert near == pytest.approx(sign * (0.05 - 1.729 * error), abs=1e-5)


@pytest.mark.parametrize(("number", "share"), [(500, 0.01), (200, 0.05), (200, 0.2), (2000, 0.01)])
def test_a_massive_change_of_few_passages_seldom_seems_smaller_than_it_is(number: int, share: float) -> None:
    """A share of the passages has some 3 nats more for each token, and the others nothing; 4 % are meant."""
    random, misses = np.random.default_rng(3), 0
    for _ in range(1000):
        tokens = np.maximum(1, random.lognormal(4.5, 0.5, number).round())
        totals = tokens * np.where(random.random(number) < share, random.gamma(8.0, 3 / 8, number), 0.0)
        misses += interval_per_token(totals.tolist(), list(map(int, tokens)), Sides(0.05, 0.04)).upper < 3 * share
    # There is room for the chance of 1,000 draws.
    assert misses / 1000 < 0.05 + 0.015


def test_a_longer_passage_counts_more_and_one_shows_no_noise() -> None:
    assert per_token([10.0, 0.0], [30, 10], Sides(0.05, 0.05))[0] == pytest.approx(0.25)
    value, interval = per_token([1.0], [10], Sides(0.05, 0.05))
    assert value == pytest.approx(0.1)
    assert interval is None


def test_the_bounds_miss_the_mean_of_all_texts_as_seldom_as_they_say() -> None:
    """Passages of unequal lengths, with increases that are skewed as measured ones are; each draw is of 100 of them."""
    random, misses = np.random.default_rng(5), 0
    for _ in range(2000):
        tokens = random.integers(20, 120, 100)
        interval = interval_per_token((tokens * random.gamma(1.0, 0.01, 100)).tolist(), tokens.tolist(), Sides(0.05, 0.05))
        misses += not interval.lower <= 0.01 <= interval.upper
    assert 0.07 < misses / 2000 < 0.15


def test_no_disagreement_in_some_tokens_does_not_mean_that_there_is_none() -> None:
    value, interval = share_per_token([50] * 100, [50] * 100, Sides(0.05, 0.05))
    assert value == 1.0
    assert interval is not None
    assert 0.999 < interval.lower < 1.0
    assert interval.upper == 1.0
