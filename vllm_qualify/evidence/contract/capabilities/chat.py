"""Chats: replies, streams, and a prompt that has all that was said before."""

from pydantic import JsonValue

from vllm_qualify.evidence.contract.asked import Asked, check_end, need, number
from vllm_qualify.evidence.contract.capabilities.probe import LONG_TOK, Body, Probe, streamed, user
from vllm_qualify.evidence.contract.chats import ChatChunk
from vllm_qualify.evidence.contract.replies import shown

# Questions that every model can answer in a few words.
QUESTIONS = ("What is 12 + 30?", "Count to 5.", "Say hello.")
PLAIN, STREAM = "chat 1", "chat_stream 1"
# A text of forty words has at least this many tokens more than one of two words.
LONG, SHORT = " ".join(["We talk about apples, pears, plums and nuts."] * 5), "Be kind."
GROWS_TOK = 20


def _chat(asked: Asked, attempt: str) -> None:
    spoken, most = asked.chat(attempt), number(asked.said, attempt, "max_tokens")
    need(spoken.text.strip(), "the reply has no text")
    tokens = spoken.usage.completion_tokens if spoken.usage else 0
    need(0 < tokens <= most, f"the reply has {tokens} tokens of at most {most}")


def _stream(asked: Asked, attempt: str) -> None:
    spoken, plain = asked.streamed_chat(attempt), asked.chat(PLAIN)
    for part, came, wanted in (
        ("thoughts", spoken.reasoning, plain.reasoning),
        ("content", spoken.content, plain.content),
    ):
        need(came == wanted, f"the stream has the {part} {shown(came)}, and the plain reply {shown(wanted)}")


def stream_usage(asked: Asked) -> None:
    usage, plain = asked.streamed_chat(STREAM).usage, asked.chat(PLAIN).usage
    need(usage is not None, "the stream's last chunk has no usage counts")
    need(usage == plain, f"the stream counts {usage}, and the plain reply {plain}")


def stream_end(asked: Asked) -> None:
    chunks = asked.said.chunks(STREAM, ChatChunk)
    check_end(asked.said.events(STREAM), [choice.finish_reason for chunk in chunks for choice in chunk.choices])


def _turns(said_by_user: str, said_by_model: str) -> Body:
    messages: list[JsonValue] = [
        {"role": "user", "content": said_by_user},
        {"role": "assistant", "content": said_by_model},
        {"role": "user", "content": QUESTIONS[0]},
    ]
    return {"messages": messages}


def _system(text: str) -> Body:
    return {"messages": [{"role": "system", "content": text}, {"role": "user", "content": QUESTIONS[0]}]}


def grows(asked: Asked, attempt: str, word: str, what: str) -> None:
    """The prompt with the long text is longer than that with the short one."""
    short, long = (_prompt_tok(asked, f"{attempt} {each}") for each in ("short", word))
    need(
        long - short >= GROWS_TOK,
        f"with 38 words more of {what} the prompt grows from {short} to {long} tokens: not all of it is there",
    )


def _prompt_tok(asked: Asked, name: str) -> int:
    usage = asked.chat(name).usage
    return usage.prompt_tokens if usage else 0


def _remembers(asked: Asked, attempt: str) -> None:
    grows(asked, attempt, "user", "the user's earlier turn")
    grows(asked, attempt, "model", "the model's earlier turn")


def _heeds_system(asked: Asked, attempt: str) -> None:
    grows(asked, attempt, "long", "the system prompt")


def _ends(asked: Asked, attempt: str) -> None:
    reason = asked.chat(attempt).reason
    need(reason == "stop", f"the reply to '{attempt}' did not end by itself, but by {reason}")


PROBES = (
    Probe("chat", [{"": user(QUESTIONS[0])}], _chat),
    Probe("chat_stream", [{"": streamed(user(QUESTIONS[0]))}], _stream),
    Probe(
        "chat_turns",
        [{"short": _turns(SHORT, SHORT), "user": _turns(LONG, SHORT), "model": _turns(SHORT, LONG)}],
        _remembers,
        tokens=1,
    ),
    Probe("chat_system", [{"short": _system(SHORT), "long": _system(LONG)}], _heeds_system, tokens=1),
    Probe("chat_end", [{"": user(question)} for question in QUESTIONS], _ends, tokens=LONG_TOK),
)
# These are of requests that are asked for other checks.
OF_OTHERS = {"chat_stream_usage": stream_usage, "chat_stream_end": stream_end}
