"""Which of this vLLM's parsers read a text that a model was trained to write: its own code reads it, and says what it found.

A script for the Python of any vLLM from 0.12 on: it imports vLLM and nothing of this project. Its first argument is a list of
questions as JSON, one for each model. It writes the list of answers to the file that the second argument names, or else to its
standard output. A question and its answer:

    {"markup": ["<tool_call>", …], "pieces": ["</", …], "tools": […], "name": "…", "arguments": {…}, "calls": ["…", …],
     "thought": "…", "answer": "…", "thoughts": ["…", …]}
    {"version": "0.32.0", "tools": {"hermes": {"reads": 0, "made_by": "Hermes2ProToolParser", "why": ""}, …}, "reasoning": {…}}

`reads` is the number of the first text from which a parser gives exactly the call's name and arguments, or exactly thought and
answer; null if it reads none, and `why` then says what it did instead. Parsers look for their markup in the tokenizer's
vocabulary: they get a tokenizer of single bytes beside the model's own `markup`, and the `pieces` of markup that it has.
"""

import contextlib
import importlib
import importlib.metadata
import importlib.util
import json
import logging
import os
import signal
import sys
from collections.abc import Callable, Iterator
from typing import Any

TOOL_PARSERS = ("vllm.tool_parsers", "vllm.entrypoints.openai.tool_parsers")
REQUESTS = ("vllm.entrypoints.openai.chat_completion.protocol", "vllm.entrypoints.openai.protocol")
# For one parser: a text of some hundred characters is read in milliseconds, and some import slowly.
MOST_S = 20


class OtherwiseError(Exception):
    """What a parser gave in place of the right answer."""


def find_module(names: tuple[str, ...]) -> Any:
    for name in names:
        with contextlib.suppress(ModuleNotFoundError):
            return importlib.import_module(name)
    raise ModuleNotFoundError(names[0])


def make_tokenizer(markup: list[str], pieces: list[str]) -> Any:
    """One that has a token for each byte, and those of the markup. It knows the pieces, too, and makes them of no text."""
    tokenizers: Any = importlib.import_module("tokenizers")
    transformers: Any = importlib.import_module("transformers")
    known = list(dict.fromkeys([*sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet()), *pieces]))
    made = tokenizers.Tokenizer(tokenizers.models.BPE({token: number for number, token in enumerate(known)}, []))
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    made.add_special_tokens([tokenizers.AddedToken(token, special=True, normalized=False) for token in markup])
    return transformers.PreTrainedTokenizerFast(tokenizer_object=made, clean_up_tokenization_spaces=False)


def make_request(tools: list[dict[str, Any]]) -> Any:
    request: Any = find_module(REQUESTS).ChatCompletionRequest
    given = {"tools": tools, "tool_choice": "auto"} if tools else {}
    return request(model="model", messages=[{"role": "user", "content": "?"}], **given)


def make_parser(parser: Any, tokenizer: Any, tools: Any) -> Any:
    """Parsers of tools take the request's since 0.20."""
    try:
        return parser(tokenizer, tools)
    except TypeError:
        return parser(tokenizer)


def parse_whole(text: str, request: Any, tokenizer: Any, **names: str) -> Any:
    """Thought, answer and calls by the parser that vLLM puts together of these: since 0.30 some can do nothing alone."""
    manager: Any = importlib.import_module("vllm.parser.parser_manager").ParserManager
    made = manager.get_parser(enable_auto_tools=True, tokenizer=tokenizer, **names)(tokenizer, request.tools)
    tokens = tokenizer.encode(text, add_special_tokens=False)
    return made.parse(text, request, enable_auto_tools=True, model_output_token_ids=tokens)


def read_calls(name: str, parser: Any, text: str, question: dict[str, Any], tokenizer: Any) -> None:
    """Raises OtherwiseError if the call in the text is not what the parser gives."""
    request = make_request(question["tools"])
    made = make_parser(parser, tokenizer, request.tools)
    try:
        found = [
            call.function for call in made.extract_tool_calls(text, made.adjust_request(request) or request).tool_calls or []
        ]
    except NotImplementedError:
        found = parse_whole(text, request, tokenizer, tool_parser_name=name)[2] or []
    calls = [(call.name, json.loads(call.arguments)) for call in found]
    if calls != [(question["name"], question["arguments"])]:
        raise OtherwiseError(f"it gives {calls}"[:200] if calls else "it finds no call")


def read_thoughts(name: str, parser: Any, text: str, question: dict[str, Any], tokenizer: Any) -> None:
    """Raises OtherwiseError if thought and answer are not what the parser gives."""
    request = make_request([])
    try:
        thought, answer = parser(tokenizer).extract_reasoning(text, request)
    except (NotImplementedError, TypeError):
        thought, answer, _ = parse_whole(text, request, tokenizer, reasoning_parser_name=name)
    if ((thought or "").strip(), (answer or "").strip()) != (question["thought"], question["answer"]):
        raise OtherwiseError(f"it gives the thought {thought!r} and the answer {answer!r}"[:200])


@contextlib.contextmanager
def limited() -> Iterator[None]:
    def end(*_: object) -> None:
        raise TimeoutError(f"it took longer than {MOST_S} s")

    signal.signal(signal.SIGALRM, end)
    signal.alarm(MOST_S)
    try:
        yield
    finally:
        signal.alarm(0)


def try_parser(find: Callable[[], Any], texts: list[str], read: Callable[[Any, str], None]) -> dict[str, Any]:
    answer: dict[str, Any] = {"reads": None, "made_by": "", "why": "there is no text to read"}
    for number, text in enumerate(texts):
        try:
            with limited():
                parser = find()
                answer["made_by"] = parser.__name__
                read(parser, text)
            return answer | {"reads": number, "why": ""}
        except Exception as error:  # whatever it is, this parser does not read this text
            said = f"{error}" if isinstance(error, OtherwiseError) else f"{type(error).__name__}: {error}"
            answer["why"] = said[:300]
    return answer


def answer_about(question: dict[str, Any]) -> dict[str, Any]:
    importlib.import_module("vllm.plugins").load_general_plugins()
    tools: Any = find_module(TOOL_PARSERS).ToolParserManager
    reasoning: Any = importlib.import_module("vllm.reasoning").ReasoningParserManager
    tokenizer = make_tokenizer(question["markup"], question["pieces"])

    def of_tools(name: str) -> dict[str, Any]:
        return try_parser(
            lambda: tools.get_tool_parser(name),
            question["calls"],
            lambda parser, text: read_calls(name, parser, text, question, tokenizer),
        )

    def of_reasoning(name: str) -> dict[str, Any]:
        return try_parser(
            lambda: reasoning.get_reasoning_parser(name),
            question["thoughts"],
            lambda parser, text: read_thoughts(name, parser, text, question, tokenizer),
        )

    return {
        "version": importlib.metadata.version("vllm"),
        "tools": {name: of_tools(name) for name in sorted(tools.list_registered())} if question["calls"] else {},
        "reasoning": {name: of_reasoning(name) for name in sorted(reasoning.list_registered())} if question["thoughts"] else {},
    }


def main() -> None:
    questions: list[dict[str, Any]] = json.loads(sys.argv[1])
    logging.disable(logging.CRITICAL)
    # vLLM prints while it is imported; only the answer may reach the output.
    answer_to = os.open(sys.argv[2], os.O_WRONLY | os.O_CREAT) if len(sys.argv) > 2 else os.dup(1)
    os.dup2(2, 1)
    answers = [answer_about(each) for each in questions]
    with os.fdopen(answer_to, "w") as out:
        json.dump(answers, out)


if __name__ == "__main__":
    main()
