"""The forms of calls that are known here, held to the tool-call parsers of the installed vLLM: all of them, by its own reading.

A version of vLLM with another parser fails here: add a call in its form to `markup.py`, or the reason why there is none.
"""

import ast
import json
import re
from pathlib import Path

import pytest

from tests.engine.script import run_script
from tests.evidence.contract.markup import CALLS, NOT_ASKED, UNKNOWN
from vllm_qualify.engine.environment import EngineEnvironment
from vllm_qualify.evidence.contract.content import check_content
from vllm_qualify.evidence.contract.replies import BrokenError
from vllm_qualify.recipe.loading import catalog_folder

pytestmark = [pytest.mark.engine, pytest.mark.usefixtures("engine")]
# The tokens of some parsers must be in the vocabulary of the model.
READ_CALLS = """
import json, sys
from transformers import AutoTokenizer
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.tool_parsers import ToolParserManager

calls, not_asked, tokens, model = *map(json.loads, sys.argv[1:4]), sys.argv[4]
tokenizer = AutoTokenizer.from_pretrained(model)
tokenizer.add_tokens(tokens)
parameters = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
tool = {"type": "function", "function": {"name": "get_weather", "description": "", "parameters": parameters}}
messages = [{"role": "user", "content": "Paris?"}]
asked = {"model": "any", "messages": messages, "tools": [tool], "tool_choice": "auto"}
read = {}
for name in ToolParserManager.list_registered():
    if name not in calls or name in not_asked:
        read[name] = None
        continue
    request = ChatCompletionRequest(**asked)
    found = ToolParserManager.get_tool_parser(name)(tokenizer, request.tools).extract_tool_calls(calls[name], request)
    read[name] = [(call.function.name, json.loads(call.function.arguments)) for call in found.tool_calls]
print(json.dumps(read))
"""
TOKEN = re.compile(r"<[^<>\s]+>|\[[A-Z_]+\]|\]<\]minimax\[>\[")
ALSO_NEEDED = ["<tool_sep>", "<|python_tag|>", "<think>", "</think>", "<response>", "</response>", "<0x0A>"]
# Texts in the parsers' files that look like markup.
LIKE_MARKUP = re.compile(r"</?[\w:|\uff5c]{3,60}>|\[/?[A-Z_]{4,20}\]")
GROUPS = ["type", "body", "name", "value", "json", "attrs", "val", "key", "rcpt", "bare_name", "sq_name", "dq_name"]
NO_MARKUP_OF_CALLS = {
    "think": "tags of thoughts: the checks of `reasoning` find them",
    "seed:think": "the same",
    "scratch_pad": "of Hermes's thoughts, which its parser does not look for",
    "response": "Ernie's answer, around which its parser takes the tags away; such a tag is in many an XML",
    "0x0A": "a byte's name in Ernie's vocabulary",
    **dict.fromkeys(GROUPS, "the name of a group in a pattern"),
}


def test_each_parser_of_the_engine_reads_its_call(engine: EngineEnvironment) -> None:
    tokens = sorted({token for call in CALLS.values() for token in TOKEN.findall(call)} | {*ALSO_NEEDED})
    given = [json.dumps(each) for each in (CALLS, list(NOT_ASKED), tokens)]
    done = run_script(engine, READ_CALLS, *given, catalog_folder() / "reference-chat" / "model")
    assert done.returncode == 0, done.stderr[-3000:]
    read = json.loads(done.stdout.splitlines()[-1])
    assert read.keys() == CALLS.keys() | UNKNOWN.keys(), "a parser whose calls are not known here, or one that is no more"
    asked = {name: calls for name, calls in read.items() if name not in NOT_ASKED | UNKNOWN}
    assert {name: calls for name, calls in asked.items() if calls != [["get_weather", {"city": "Paris"}]]} == {}
    assert len(asked) > 45


def test_what_looks_like_markup_in_the_parsers_files_is_known(engine: EngineEnvironment) -> None:
    (package,) = engine.python.parents[1].glob("lib/python*/site-packages/vllm")
    files = [*(package / "tool_parsers").glob("*.py"), *(package / "parser").glob("*.py")]
    assert len(files) > 60
    found = {text for file in files for constant in constants_of(file) for text in LIKE_MARKUP.findall(constant)}
    assert {"<tool_call>", "[TOOL_CALLS]", "<|tool_call>"} <= found
    unknown = {text.strip("</>") for text in found if not is_markup(text)}
    assert unknown <= NO_MARKUP_OF_CALLS.keys()


def is_markup(text: str) -> bool:
    try:
        check_content("asked", text)
    except BrokenError:
        return True
    return False


def constants_of(file: Path) -> list[str]:
    """The texts of a file but its docstrings."""
    tree = ast.parse(file.read_text())
    lone = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    texts = (node for node in ast.walk(tree) if isinstance(node, ast.Constant) and id(node) not in lone)
    return [node.value for node in texts if isinstance(node.value, str)]
