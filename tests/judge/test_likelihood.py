"""The cell's likelihoods beside its baseline's, from captured replies of the reference model and of its regressed copy."""

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.builders.comparisons import CPU, RUN, against, cell_plan, task_plan
from tests.lm_eval_files import CAPTURED as ANSWERED
from vllm_qualify.evidence.measurement import Measurement
from vllm_qualify.evidence.stages.likelihood import LIKELIHOOD
from vllm_qualify.evidence.stages.stage import MACHINE
from vllm_qualify.evidence.stages.table import parse, parse_unfinished
from vllm_qualify.judge.compare.enough import not_established
from vllm_qualify.judge.compare.gates import compare
from vllm_qualify.judge.compare.settings import likelihood_differs
from vllm_qualify.judge.expectations import judge
from vllm_qualify.judge.verdict import GateVerdict
from vllm_qualify.plan.cell import CellPlan, LikelihoodPlan
from vllm_qualify.recipe.accuracy import Accuracy, Likelihood
from vllm_qualify.recipe.gates import Gate, gate_of

CAPTURED = Path(__file__).parents[1] / "evidence" / "captured" / "likelihood"
TEXTS = CAPTURED / "given-texts.jsonl"
SCORED = LikelihoodPlan(
    settings=Likelihood(texts="texts.jsonl"), texts=TEXTS, texts_sha256=hashlib.sha256(TEXTS.read_bytes()).hexdigest()
)
METRICS = ["text_nll_nat_per_tok", "text_top1_share", "answer_nll_nat_per_tok", "answer_top1_share"]


def increase(metric: str = "answer_nll_nat_per_tok", bound: float = 0.0005) -> Gate:
    return gate_of(metric=metric, max_nll_increase=bound, unit="nat/tok")


def agreement(metric: str = "answer_top1_share", bound: float = 0.9) -> Gate:
    return gate_of(metric=metric, min_top1_agreement=bound, unit="fraction")


def plan_of(*gates: Gate, scored: LikelihoodPlan | None = SCORED, **changes: Any) -> CellPlan:
    task = task_plan(Accuracy(num_questions=8, num_fewshot=1, max_gen_toks=48), repetitions=2)
    plan = cell_plan(gates or [increase()], accuracy=[task], likelihood=scored, **changes)
    return against(plan, likelihood=SCORED, served_model_name="reference") if plan.baseline else plan


@pytest.fixture
def evidence(tmp_path: Path) -> Path:
    """The regressed copy beside the reference model."""
    folder = tmp_path / "evidence"
    shutil.copytree(ANSWERED, folder / "baseline" / "accuracy" / "gsm8k")
    shutil.copytree(CAPTURED / "bf16", folder / "baseline" / "likelihood")
    shutil.copytree(CAPTURED / "regressed", folder / "likelihood")
    shutil.copy(TEXTS, folder / "likelihood")
    (folder / "likelihood" / MACHINE).write_text(CPU.model_dump_json())
    return folder


def sums(folder: Path, file: str = "answers.jsonl") -> tuple[float, int, list[str]]:
    """By hand: the sum of the texts' log-likelihoods, their tokens, and the likeliest token at each place."""
    nll, tokens, first = 0.0, 0, []
    for line in (json.loads(text) for text in (folder / file).read_text().splitlines()):
        own = line["tokens"][line["begins"] :]
        for token, at in zip(own, line["reply"]["choices"][0]["prompt_logprobs"], strict=True):
            nll -= at[str(token)]["logprob"]
            first.append(min(at, key=lambda name: at[name]["rank"]))
        tokens += len(own)
    return nll, tokens, first


def compare_likelihoods(plan: CellPlan, evidence: Path) -> list[Measurement]:
    return compare(plan, evidence, parse_unfinished("likelihood", plan, evidence))


def verdict(gate: Gate, evidence: Path) -> GateVerdict:
    plan = plan_of(gate)
    (gate_verdict,) = judge(plan.judged_gates, compare_likelihoods(plan, evidence), "one").gates
    return gate_verdict


def reason(gate: Gate, evidence: Path, plan: CellPlan | None = None) -> str:
    (comparison,) = compare_likelihoods(plan or plan_of(gate), evidence)
    assert comparison.value is None
    return comparison.invalid_because or ""


def test_the_stage_measures_all_of_them(evidence: Path) -> None:
    measurements = parse("likelihood", plan_of(), evidence)
    assert sorted(row.metric for row in measurements) == sorted(METRICS)
    assert all(row.value is not None and row.interval is not None for row in measurements)
    nll, tokens, _ = sums(evidence / "likelihood")
    (own,) = (row for row in measurements if row.metric == "answer_nll_nat_per_tok")
    assert own.value == pytest.approx(nll / tokens)
    assert (own.sample_count, own.unit) == (8, "nat/tok")


@pytest.mark.parametrize("file", ["answers.jsonl", "texts.jsonl"])
def test_the_increase_and_the_agreement_are_those_of_the_replies(file: str, evidence: Path) -> None:
    of = "answer" if file.startswith("answers") else "text"
    plan = plan_of(increase(f"{of}_nll_nat_per_tok"), agreement(f"{of}_top1_share"))
    gained, agreed = compare_likelihoods(plan, evidence)
    then, tokens, before = sums(evidence / "baseline" / "likelihood", file)
    now, _, after = sums(evidence / "likelihood", file)
    assert gained.value == pytest.approx((now - then) / tokens)
    assert agreed.value == pytest.approx(sum(one == other for one, other in zip(before, after, strict=True)) / tokens)
    assert (gained.unit, agreed.unit, gained.against, agreed.against) == ("nat/tok", "fraction", RUN, RUN)


def test_the_regressed_copy_finds_the_answers_less_likely_and_disagrees_about_more_tokens(evidence: Path) -> None:
    gate_verdict = verdict(increase(bound=0.1), evidence)
    assert gate_verdict.verdict == "pass"
    assert gate_verdict.value is not None
    assert 0.003 < gate_verdict.value < 0.01
    assert verdict(increase("text_nll_nat_per_tok", 1e-9), evidence).verdict == "fail"
    # Most of the increase is of one answer of eight, so that it is far from sure.
    assert verdict(increase(bound=0.005), evidence).verdict == "inconclusive"
    assert verdict(agreement("text_top1_share", 0.5), evidence).verdict == "pass"
    assert verdict(agreement("text_top1_share", 0.999), evidence).verdict == "fail"


def test_the_same_build_is_as_likely_as_itself(evidence: Path) -> None:
    for file in ("answers.jsonl", "texts.jsonl"):
        shutil.copy(CAPTURED / "bf16" / file, evidence / "likelihood" / file)
    assert verdict(increase(bound=1e-6), evidence).verdict == "pass"
    gate_verdict = verdict(agreement(bound=0.99), evidence)
    assert (gate_verdict.verdict, gate_verdict.value) == ("pass", 1.0)


def test_a_gain_is_below_zero_and_passes(evidence: Path) -> None:
    for mine, theirs in (("likelihood", "bf16"), ("baseline/likelihood", "regressed")):
        shutil.copy(CAPTURED / theirs / "answers.jsonl", evidence / mine / "answers.jsonl")
    gate_verdict = verdict(increase(bound=0.01), evidence)
    assert gate_verdict.verdict == "pass"
    assert gate_verdict.value is not None
    assert gate_verdict.value < 0


def rewrite(path: Path, change: Any) -> None:
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    change(lines)
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))


def another_tokenizer(lines: list[Any]) -> None:
    """The last token, the same letters under another id."""
    line = lines[0]
    place = line["reply"]["choices"][0]["prompt_logprobs"][-1]
    place["717"] = place.pop(str(line["tokens"][-1]))
    line["tokens"][-1] = 717


def test_another_tokenizer_is_reported(evidence: Path) -> None:
    rewrite(evidence / "likelihood" / "answers.jsonl", another_tokenizer)
    assert "1 texts have other tokens than for the baseline, gsm8k 0" in reason(increase(), evidence)


def test_another_context_is_compared(evidence: Path) -> None:
    """Of a chat, a server's own template comes before the answer: what a changed one does to the answer is to be seen."""
    rewrite(evidence / "likelihood" / "answers.jsonl", lambda lines: lines[0]["tokens"].__setitem__(2, 700))
    (comparison,) = compare_likelihoods(plan_of(), evidence)
    assert comparison.value is not None


@pytest.mark.parametrize("where", ["likelihood", "baseline/likelihood"])
@pytest.mark.parametrize(("metric", "file"), [("answer_nll_nat_per_tok", "answers"), ("text_nll_nat_per_tok", "texts")])
def test_scores_of_either_that_are_gone_or_cut_are_no_comparison(metric: str, file: str, where: str, evidence: Path) -> None:
    path = evidence / where / f"{file}.jsonl"
    rewrite(path, lambda lines: lines.pop())
    assert "were scored, which are not the" in reason(increase(metric), evidence)
    path.unlink()
    assert f"No such file or directory: {file}.jsonl" in reason(increase(metric), evidence)


def test_another_model_other_texts_or_no_answers_are_no_comparison(evidence: Path) -> None:
    plan = against(plan_of(), served_model_name="other")
    assert "of the model reference, not other" in reason(increase(), evidence, plan)
    rewrite(evidence / "likelihood" / "given-texts.jsonl", lambda lines: lines[0].update(text="Another."))
    assert "the texts are not those of the plan" in reason(increase("text_nll_nat_per_tok"), evidence)
    shutil.rmtree(evidence / "baseline" / "accuracy")
    assert "no task has answers with a text" in reason(increase(), evidence)


def test_a_run_that_becomes_a_baseline_scores_its_own_answers(evidence: Path) -> None:
    plan = plan_of(increase(), agreement(), baseline=None)
    shutil.move(evidence / "baseline" / "accuracy", evidence / "accuracy")
    shutil.rmtree(evidence / "baseline")
    assert plan.scores_answers
    measured = parse("likelihood", plan, evidence)
    assert compare(plan, evidence, measured) == []
    assert not_established(plan, evidence, measured) == []
    (evidence / "likelihood" / "answers.jsonl").unlink()
    lacking = [gate.label for gate, _ in not_established(plan, evidence, parse("likelihood", plan, evidence))]
    assert lacking == ["answer_nll_nat_per_tok against the baseline", "answer_top1_share against the baseline"]
    assert not plan_of(baseline=None, establishes=False).scores_answers


@pytest.mark.parametrize(
    ("then", "message"),
    [
        (None, "the baseline scored no texts"),
        (LikelihoodPlan(settings=Likelihood()), "other texts, or more answers"),
        (SCORED.model_copy(update={"texts_sha256": "0" * 64}), "other texts, or more answers"),
        (SCORED.model_copy(update={"settings": Likelihood(num_answers=501)}), "other texts, or more answers"),
        (SCORED.model_copy(update={"settings": Likelihood(num_answers=200)}), None),
        (SCORED.model_copy(update={"texts": Path("/elsewhere"), "settings": Likelihood(time_limit_s=1.0)}), None),
    ],
)
def test_what_the_baseline_scored_must_be_the_same_for_a_gate_on_it(then: LikelihoodPlan | None, message: str | None) -> None:
    difference = likelihood_differs(against(plan_of(), likelihood=then))
    assert message in (difference or "") if message else difference is None
    other = gate_of(metric="exact_match", task="gsm8k", filter="strict-match", max_loss=0.05, unit="fraction")
    assert likelihood_differs(against(plan_of(other), likelihood=then)) is None


def test_of_a_baseline_that_scored_fewer_answers_just_these_are_compared(evidence: Path) -> None:
    """Answers are in the order of a hash, so that any first ones are a random draw."""
    for where in ("likelihood", "baseline/likelihood"):
        rewrite(evidence / where / "answers.jsonl", lambda lines: lines.__delitem__(slice(5, None)))
    fewer = against(plan_of(), likelihood=SCORED.model_copy(update={"settings": Likelihood(num_answers=5)}))
    (comparison,) = compare_likelihoods(fewer, evidence)
    assert comparison.sample_count == 5
    assert "5 texts were scored, which are not the 8" in reason(increase(), evidence)


def test_the_verdict_says_how_rare_a_change_can_go_unseen(evidence: Path) -> None:
    """By hand: of eight texts none has a change with a chance of 3 % where 35 % of all have it: 0.645 ** 8 is 0.03."""
    for gate in (increase(bound=0.1), agreement(bound=0.5)):
        assert verdict(gate, evidence).because == (
            "the whole interval meets the bound; the interval does not have a change that hits fewer than 35 % of the texts,"
            " which 8 cannot show: 16 would show one that hits 20 %"
        )


def test_cells_of_one_server_share_what_they_score_alike() -> None:
    ours = plan_of()
    assert LIKELIHOOD.is_shared(ours, plan_of(run_id="another"))
    assert not LIKELIHOOD.is_shared(ours, plan_of(scored=LikelihoodPlan(settings=Likelihood())))
    assert not LIKELIHOOD.is_shared(ours, plan_of(baseline=None))
