"""/v1/responses: plain and as a stream."""

from vllm_qualify.evidence.contract.capabilities.chat import QUESTIONS
from vllm_qualify.evidence.contract.capabilities.probe import SHORT_TOK, Body, Probe
from vllm_qualify.evidence.contract.content import check_content
from vllm_qualify.evidence.contract.exchange import RESPONSES
from vllm_qualify.evidence.contract.replies import Form, Response, need, parse_form, shorten
from vllm_qualify.evidence.contract.transcript import Transcript

TEXT_PIECES = ("response.reasoning_text.delta", "response.output_text.delta")
ENDS = ("response.completed", "response.incomplete")


class Event(Form):
    type: str


class PieceEvent(Form):
    delta: str


class EndEvent(Form):
    response: Response


def _check_plain(replies: Transcript, attempt: str) -> None:
    reply = replies.read_own(attempt, Response)
    text = reply.text("message")
    is_whole = reply.status == "completed" and text.strip()
    need(is_whole, f"the reply to '{attempt}' is {reply.status}, and its message {shorten(text)}")
    check_content(attempt, text)


def _check_stream(replies: Transcript, attempt: str) -> None:
    name = f"{attempt} stream"
    events = replies.events(name)
    kinds = [parse_form(name, event, Event).type for event in events]
    ends = f"does not end with {' or '.join(ENDS)}, but with {shorten(str(kinds[-1:]))}"
    need(kinds and kinds[-1] in ENDS, f"the stream '{name}' {ends}")
    pieces = [event for event, kind in zip(events, kinds, strict=True) if kind in TEXT_PIECES]
    came = "".join(parse_form(name, piece, PieceEvent).delta for piece in pieces)
    plain, ended = replies.read_own(f"{attempt} plain", Response), parse_form(name, events[-1], EndEvent).response
    # Thoughts included.
    wanted = plain.text("reasoning", "message")
    need(came == wanted, f"the stream has {shorten(came)}, and the plain reply {shorten(wanted)}")
    need(ended.usage == plain.usage, f"the stream counts {ended.usage}, and the plain reply {plain.usage}")


def _response_body(question: str, **keys: bool) -> Body:
    return {"input": question, "store": False, **keys}


PLAIN_BODIES = [{"": _response_body(question)} for question in QUESTIONS]
BOTH_BODIES = {"plain": _response_body(QUESTIONS[0]), "stream": _response_body(QUESTIONS[0], stream=True)}
PROBES = (
    Probe("responses", PLAIN_BODIES, _check_plain, path=RESPONSES),
    Probe("responses_stream", [BOTH_BODIES], _check_stream, SHORT_TOK, path=RESPONSES),
)
