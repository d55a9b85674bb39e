"""The likelihood stage: the server scores the baseline's answers, or its own ones, and the recipe's texts."""

import hashlib
from pathlib import Path
from typing import Any

from vllm_qualify.errors import HostError
from vllm_qualify.evidence import likelihood, passages
from vllm_qualify.evidence.likelihood import Scored
from vllm_qualify.evidence.measurement import UNUSABLE, Measurement, in_words, invalid
from vllm_qualify.evidence.passages import Passage
from vllm_qualify.evidence.sequential import levels_for
from vllm_qualify.evidence.stages.accuracy import ACCURACY, tasks_as_inputs
from vllm_qualify.evidence.stages.stage import Stage, inputs_of, settled
from vllm_qualify.evidence.stages.world import Commands, World
from vllm_qualify.plan.cell import CellPlan
from vllm_qualify.recipe.metrics import ANSWER_NLL, ANSWER_TOP1, TEXT_NLL, TEXT_TOP1

OF_ANSWERS, OF_TEXTS = (ANSWER_NLL, ANSWER_TOP1), (TEXT_NLL, TEXT_TOP1)
NO_LIKELIHOOD = "the recipe has no likelihood"


class LikelihoodStage(Stage, name="likelihood", is_timed=False, counts="texts"):
    """The server scores the recipe's texts, and then the baseline's answers or its own ones."""

    def is_wanted(self, plan: CellPlan) -> bool:
        return plan.scores_answers

    def settings(self, plan: CellPlan) -> dict[str, dict[str, Any]]:
        return {"likelihood": plan.likelihood.settings.model_dump()} if plan.likelihood else {}

    def inputs(self, plan: CellPlan) -> Any:
        """The settings, the texts by their content, and what determines the answers: the baseline's run, or the tasks."""
        planned = plan.likelihood
        scored = [inputs_of(planned.settings), planned.texts_sha256] if planned else None
        return [scored, tasks_as_inputs(plan), plan.baseline.run_id if plan.baseline else None, plan.establishes]

    def shareable(self, plan: CellPlan) -> Any:
        return ACCURACY.shareable(plan), plan.likelihood, plan.establishes

    def measure(self, world: World, folder: Path) -> Commands:
        """Have the server score the texts and the answers.

        Raises HostError if the file of texts was changed since the plan was made, RecipeError if a text of the recipe is longer
        than what the server takes, ReleaseError if the server has ended.
        """
        planned, server = settled(world.plan.likelihood, NO_LIKELIHOOD), world.served.server
        limit_s = planned.settings.time_limit_s
        if planned.texts:
            content = planned.texts.read_bytes() if planned.texts.is_file() else b""
            if hashlib.sha256(content).hexdigest() != planned.texts_sha256:
                problem = f"{planned.texts} is not there any more, or was changed since the run began"
                raise HostError(problem, "leave it alone during a run, and qualify again", likelihood.STAGE)
            (folder / passages.TEXTS).write_bytes(content)
            texts = list(passages.read_texts(content))
            likelihood.measure_likelihood(server, texts, folder / likelihood.TEXTS, limit_s, world.progress)
        try:
            answered = passages.answered_passages(world.plan, world.evidence)
        except UNUSABLE:
            # The measurements will say so.
            return []
        likelihood.measure_likelihood(server, answered, folder / likelihood.ANSWERS, limit_s, world.progress)
        return []

    def parse(self, plan: CellPlan, evidence: Path) -> list[Measurement]:
        sources = [(OF_ANSWERS, scored_answers, likelihood.ANSWERS)]
        sources += [(OF_TEXTS, scored_texts, likelihood.TEXTS)] if settled(plan.likelihood, NO_LIKELIHOOD).texts_sha256 else []
        measurements = []
        for metrics, read, file in sources:
            source = f"{likelihood.STAGE}/{file}"
            try:
                measurements += likelihood.parse_likelihood(read(plan, evidence), metrics, levels_for(plan), source)
            except UNUSABLE as error:
                measurements += [invalid(metric, f"no usable scores: {in_words(error)}", source) for metric in metrics]
        return measurements


def scored_answers(plan: CellPlan, evidence: Path, *, of_baseline: bool = False) -> list[Scored]:
    """The scores, by the cell or by its baseline, of the answers that the cell scored. Raises one of UNUSABLE."""
    return _read_scores(plan, evidence, likelihood.ANSWERS, passages.answered_passages(plan, evidence), of_baseline=of_baseline)


def scored_texts(plan: CellPlan, evidence: Path, *, of_baseline: bool = False) -> list[Scored]:
    """The scores, by the cell or by its baseline, of the recipe's texts. Raises one of UNUSABLE."""
    content = (evidence / likelihood.STAGE / passages.TEXTS).read_bytes()
    if hashlib.sha256(content).hexdigest() != settled(plan.likelihood, NO_LIKELIHOOD).texts_sha256:
        raise ValueError("the texts are not those of the plan")
    return _read_scores(plan, evidence, likelihood.TEXTS, list(passages.read_texts(content)), of_baseline=of_baseline)


def _read_scores(plan: CellPlan, evidence: Path, file: str, wanted: list[Passage], *, of_baseline: bool) -> list[Scored]:
    folder = evidence / passages.BASELINE if of_baseline else evidence
    model = plan.compared_with.served_model_name if of_baseline else plan.server.served_model_name
    return likelihood.read_scored(folder / likelihood.STAGE / file, wanted, model)


LIKELIHOOD = LikelihoodStage()
