"""Chats: replies, streams, and a prompt that has all that was said before."""

from functools import partial

from pydantic import JsonValue

from vllm_qualify.evidence.contract.capabilities.probe import SHORT_TOK, Body, Probe, stream_body, user_body
from vllm_qualify.evidence.contract.content import check_content
from vllm_qualify.evidence.contract.replies import Chat, ChatChunk, need, shorten
from vllm_qualify.evidence.contract.transcript import Transcript, check_stream_usage

# Questions that every model can answer in a few words.
QUESTIONS = ("What is 12 + 30?", "Count to 5.", "Say hello.")
PLAIN, STREAM = "chat 1", "chat_stream 1"
# A text of forty words has at least this many tokens more than one of two words.
LONG, SHORT = " ".join(["We talk about apples, pears, plums and nuts."] * 5), "Be kind."
GROWS_TOK = 20


def _check_chat(replies: Transcript, attempt: str) -> None:
    spoken = replies.chat(attempt)
    replies.check_length(attempt, spoken.text, spoken.usage)
    check_content(attempt, spoken.content)


def _check_stream(replies: Transcript, attempt: str) -> None:
    spoken, plain = replies.streamed_chat(attempt), replies.chat(PLAIN)
    for part, came, wanted in (("thoughts", spoken.reasoning, plain.reasoning), ("content", spoken.content, plain.content)):
        need(came == wanted, f"the stream has the {part} {shorten(came)}, and the plain reply {shorten(wanted)}")


def _history_body(**said: str) -> Body:
    """A chat in which the user asks something after what these roles said."""
    messages: list[JsonValue] = [{"role": role, "content": text} for role, text in said.items()]
    return {"messages": [*messages, {"role": "user", "content": QUESTIONS[0]}]}


def check_growth(replies: Transcript, attempt: str, **parts: str) -> None:
    """Check, for each part by its attempt's word, that the prompt with the long text is longer than that with the short one."""
    for word, part in parts.items():
        short, long = (replies.read_own(f"{attempt} {each}", Chat).usage.prompt_tokens for each in ("short", word))
        grows = f"with 38 words more of {part} the prompt grows from {short} to {long} tokens: not all of it is there"
        need(long - short >= GROWS_TOK, grows)


def _check_end_reason(replies: Transcript, attempt: str) -> None:
    spoken = replies.chat(attempt)
    need(spoken.reason == "stop", f"the reply to '{attempt}' did not end by itself, but by {spoken.reason}")
    # A short reply of a model that thinks has no content yet; this one has.
    check_content(attempt, spoken.content)


SYSTEM = {"short": _history_body(system=SHORT), "long": _history_body(system=LONG)}
TURNS = {
    "short": _history_body(user=SHORT, assistant=SHORT),
    "user": _history_body(user=LONG, assistant=SHORT),
    "model": _history_body(user=SHORT, assistant=LONG),
}
_check_turns = partial(check_growth, user="the user's earlier turn", model="the model's earlier turn")

PROBES = (
    Probe("chat", [{"": user_body(QUESTIONS[0])}], _check_chat, SHORT_TOK),
    Probe("chat_stream", [{"": stream_body(user_body(QUESTIONS[0]))}], _check_stream, SHORT_TOK),
    Probe("chat_turns", [TURNS], _check_turns, tokens=1),
    Probe("chat_system", [SYSTEM], partial(check_growth, long="the system prompt"), tokens=1),
    Probe("chat_end", [{"": user_body(question)} for question in QUESTIONS], _check_end_reason),
)
# These are of requests that are asked for other checks.
OF_OTHERS = {
    "chat_stream_usage": lambda replies: check_stream_usage(replies.streamed_chat(STREAM).usage, replies.chat(PLAIN).usage),
    "chat_stream_end": lambda replies: replies.check_end(STREAM, ChatChunk),
}
