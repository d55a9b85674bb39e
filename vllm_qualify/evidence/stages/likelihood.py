"""The likelihood stage: the server scores the baseline's answers, or its own ones, and the recipe's texts."""

import hashlib
from pathlib import Path
from typing import Any

from vllm_qualify.engine.process import Progress
from vllm_qualify.errors import HostError
from vllm_qualify.evidence import likelihood, passages
from vllm_qualify.evidence.likelihood import Scored
from vllm_qualify.evidence.measurement import UNUSABLE, Measurement, StageEvidence, in_words, invalid
from vllm_qualify.evidence.passages import Passage
from vllm_qualify.evidence.sequential import levels_for
from vllm_qualify.evidence.serving import Served
from vllm_qualify.evidence.stages.accuracy import asks_alike, tasks_as_inputs
from vllm_qualify.evidence.stages.stage import Commands, StageKind, dumped
from vllm_qualify.plan.cell import CellPlan, LikelihoodPlan
from vllm_qualify.recipe.metrics import ANSWER_NLL, ANSWER_TOP1, TEXT_NLL, TEXT_TOP1

OF_ANSWERS, OF_TEXTS = (ANSWER_NLL, ANSWER_TOP1), (TEXT_NLL, TEXT_TOP1)


def likelihood_stage(served: Served, plan: CellPlan, evidence: Path, progress: Progress) -> StageEvidence:
    """Have the server score the recipe's texts, and then the answers.

    Raises:
        HostError: the file of texts was changed since the plan was made.
        RecipeError, ReleaseError: as `likelihood.measure_likelihood`.
    """
    planned = _planned(plan)

    def measure(folder: Path) -> Commands:
        limit_s = planned.settings.time_limit_s
        if planned.texts:
            content = _copied(planned, folder / passages.TEXTS)
            texts = list(passages.given(content))
            likelihood.measure_likelihood(served.server, texts, folder / likelihood.TEXTS, limit_s, progress)
        try:
            answered = passages.answered_passages(plan, evidence)
        except UNUSABLE:
            # The measurements will say so.
            return []
        likelihood.measure_likelihood(served.server, answered, folder / likelihood.ANSWERS, limit_s, progress)
        return []

    return LIKELIHOOD.run(plan, evidence, measure, {})


def scores_alike(ours: CellPlan, theirs: CellPlan) -> bool:
    """Whether one cell's scores can serve the other: the same server scores the same answers and texts."""
    return asks_alike(ours, theirs) and (ours.likelihood, ours.establishes) == (theirs.likelihood, theirs.establishes)


def _planned(plan: CellPlan) -> LikelihoodPlan:
    if plan.likelihood is None:
        raise ValueError("the recipe has no likelihood")
    return plan.likelihood


def _copied(planned: LikelihoodPlan, copy: Path) -> bytes:
    """The file of texts, with a copy of it among the evidence: it is read from there."""
    content = planned.texts.read_bytes() if planned.texts and planned.texts.is_file() else b""
    if hashlib.sha256(content).hexdigest() != planned.texts_sha256:
        problem = f"{planned.texts} is not there any more, or was changed since the run began"
        raise HostError(problem, "leave it alone during a run, and qualify again", likelihood.STAGE)
    copy.write_bytes(content)
    return content


def scored_answers(plan: CellPlan, evidence: Path, *, of_baseline: bool = False) -> list[Scored]:
    """The scores, by the cell or by its baseline, of the answers that the cell scored. Raises one of UNUSABLE."""
    return _scored(plan, evidence, likelihood.ANSWERS, passages.answered_passages(plan, evidence), of_baseline=of_baseline)


def scored_texts(plan: CellPlan, evidence: Path, *, of_baseline: bool = False) -> list[Scored]:
    """The scores, by the cell or by its baseline, of the recipe's texts. Raises one of UNUSABLE."""
    content = (evidence / likelihood.STAGE / passages.TEXTS).read_bytes()
    if hashlib.sha256(content).hexdigest() != _planned(plan).texts_sha256:
        raise ValueError("the texts are not those of the plan")
    return _scored(plan, evidence, likelihood.TEXTS, list(passages.given(content)), of_baseline=of_baseline)


def _scored(plan: CellPlan, evidence: Path, file: str, wanted: list[Passage], *, of_baseline: bool) -> list[Scored]:
    folder = evidence / passages.BASELINE if of_baseline else evidence
    model = plan.compared_with.served_model_name if of_baseline else plan.server.served_model_name
    return likelihood.read_scored(folder / likelihood.STAGE / file, wanted, model)


def _parse(plan: CellPlan, evidence: Path) -> list[Measurement]:
    sources = [(OF_ANSWERS, scored_answers, likelihood.ANSWERS)]
    sources += [(OF_TEXTS, scored_texts, likelihood.TEXTS)] if _planned(plan).texts_sha256 else []
    measurements = []
    for metrics, read, file in sources:
        source = f"{likelihood.STAGE}/{file}"
        try:
            measurements += likelihood.parse_likelihood(read(plan, evidence), metrics, levels_for(plan), source)
        except UNUSABLE as error:
            measurements += [invalid(metric, f"no usable scores: {in_words(error)}", source) for metric in metrics]
    return measurements


def _settings(plan: CellPlan) -> dict[str, dict[str, Any]]:
    return {"likelihood": plan.likelihood.settings.model_dump()} if plan.likelihood else {}


def _inputs(plan: CellPlan) -> list[Any]:
    """The settings, the texts by their content, and what determines the answers: the baseline's run, or the tasks."""
    planned = plan.likelihood
    scored = [dumped(planned.settings) | {"texts": None}, planned.texts_sha256] if planned else None
    return [scored, tasks_as_inputs(plan), plan.baseline.run_id if plan.baseline else None, plan.establishes]


def _longest_s(plan: CellPlan) -> float:
    """Each answer and each text is scored by three requests: two that split it into tokens, and one for their likelihoods."""
    if plan.likelihood is None:
        return 0.0
    texts = len(plan.likelihood.texts.read_bytes().splitlines()) if plan.likelihood.texts else 0
    settings = plan.likelihood.settings
    return (settings.num_answers * len(plan.accuracy) + texts) * 3 * settings.time_limit_s


LIKELIHOOD = StageKind(
    name="likelihood",
    is_wanted=lambda plan: plan.scores_answers,
    needs_server=lambda _: True,
    is_timed=False,
    uses_bench=False,
    grows=False,
    settings=_settings,
    inputs=_inputs,
    longest_s=_longest_s,
    parse=_parse,
)
