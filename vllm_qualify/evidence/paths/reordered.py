"""Replies with a form by a server that was started again, and whose first form was one of another kind.

vLLM has one backend for all forms. Where nothing names it, the first form after a start decides: xgrammar mostly, and another
one for a schema that xgrammar would not keep. So two starts of one build can keep the same form by two backends. (Read in
vLLM 0.32: `StructuredOutputManager.grammar_init` and `SamplingParams._validate_structured_outputs`.)
"""

import time
from collections.abc import Collection
from pathlib import Path

from vllm_qualify.engine.kinds.base import EngineKind
from vllm_qualify.engine.server import Server
from vllm_qualify.errors import HostError
from vllm_qualify.evidence.contract.exchange import Request
from vllm_qualify.evidence.contract.replies import MissingError
from vllm_qualify.evidence.measurement import UNUSABLE, Measurement, in_words, invalid, valid
from vllm_qualify.evidence.paths.constrained import (
    EXCHANGES,
    REFUSALS,
    Form,
    FormAsking,
    Schema,
    ask_all,
    describe_broken,
    doubt_cuts,
    forms_of,
    judge_replies,
    read_timed,
    requests_of,
)
from vllm_qualify.evidence.paths.measure import decide_asking
from vllm_qualify.recipe.contract import Capability
from vllm_qualify.recipe.metrics import REORDERED, path_metric
from vllm_qualify.recipe.paths import FORMS_OPTION, Paths

REMEDY = f"name the `backend` in `{FORMS_OPTION}`, so that no form decides it for all others"
HOW, FIRST, NOT_TAKEN = "how.json", "first.jsonl", "not-taken.txt"
# All cells of a server have one such start, so that these are no settings of a profile.
NUM_REPLIES, AT_ONCE = 128, 32
# xgrammar does not keep multiples.
OTHER_SCHEMA: Schema = {
    "type": "object",
    "properties": {"size": {"type": "integer", "enum": [2, 4], "multipleOf": 2}},
    "required": ["size"],
    "additionalProperties": False,
}
OTHER_FORM, OTHER_ASKING = Form(OTHER_SCHEMA), FormAsking(told=False, thinks=True)


def measure_reordered(server: Server, settings: Paths, capabilities: Collection[Capability], folder: Path) -> None:
    """Ask for the other schema first, and then for all forms, many at once. Raises ReleaseError if the server has ended."""
    folder.mkdir()
    limit_s, model = settings.time_limit_s, server.served_model_name
    ask_all(server, _first_requests(model), 1, limit_s, time.monotonic(), folder / FIRST)
    try:
        asking = decide_asking(server, settings)
    except HostError as error:
        (folder / NOT_TAKEN).write_text(f"{error}\n", encoding="utf-8")
        return
    (folder / HOW).write_text(asking.model_dump_json())
    requests = requests_of(forms_of(capabilities, NUM_REPLIES), model, asking)
    ask_all(server, requests, AT_ONCE, limit_s, time.monotonic(), folder / EXCHANGES)


def parse_reordered(
    folder: Path, model: str, capabilities: Collection[Capability], kind: EngineKind, place: str
) -> Measurement:
    """Whether all replies have their form. `place` is the folder's in the evidence."""
    name, source = path_metric(REORDERED), f"{place}/{EXCHANGES}"
    if (folder / NOT_TAKEN).is_file():
        because = (folder / NOT_TAKEN).read_text(errors="replace")[:600].strip()
        return invalid(name, f"the forms were not asked for: {because}", source, is_unproven=True)
    try:
        (first,) = read_timed(folder / FIRST)
        if first.exchange.status in REFUSALS:
            refused = f"the server refuses the schema that it was asked for first: HTTP {first.exchange.status}"
            return invalid(name, f"{refused}; leave `{REORDERED}` out", source, is_unproven=True)
        asking = FormAsking.model_validate_json((folder / HOW).read_bytes())
        forms = forms_of(capabilities, NUM_REPLIES)
        first_judged = judge_replies(folder / FIRST, [OTHER_FORM], _first_requests(model), kind, OTHER_ASKING)
        judged = judge_replies(folder / EXCHANGES, forms, requests_of(forms, model, asking), kind, asking)
    except (*UNUSABLE, MissingError) as error:
        return invalid(name, f"no usable replies: {in_words(error)}", source)
    broken_first, broken = describe_broken(first_judged), describe_broken(judged)
    doubts = [*doubt_cuts(judged, asking)]
    if doubts and not (broken_first or broken):
        return invalid(name, "; ".join(doubts), source, is_unproven=True)
    first_words = f"the first form of all: {broken_first}" if broken_first else ""
    faults = [words for words in (first_words, broken) if words]
    finding = "; ".join([*faults, *doubts, REMEDY]) if faults else ""
    count = sum(not reply.is_cut for reply in [*first_judged, *judged])
    return valid(name, float(not finding), source, finding=finding, sample_count=count, traced_to=[source, f"{place}/{FIRST}"])


def _first_requests(model: str) -> list[Request]:
    return requests_of([OTHER_FORM], model, OTHER_ASKING)
