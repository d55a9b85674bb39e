"""Chat templates are code from outside: they are rendered apart, within bounds, and see nothing of this process."""

from pathlib import Path
from typing import Any

import pytest

from tests.builders.families import NAMES, make_model, read_family
from vllm_qualify.drift.templates import ask_template
from vllm_qualify.errors import CallerError
from vllm_qualify.recipe.drafting.chats import ANSWER, NAME, THOUGHT, Told
from vllm_qualify.recipe.drafting.model_files import read_model_files, token_text

CHATML = """{%- for message in messages %}{{ '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""


def told_by(template: str, folder: Path, **changes: Any) -> Told:
    document = read_family("smollm2") | {"template": template} | changes
    return ask_template(read_model_files(make_model(document, folder / "it"), "the-model"))


def problem_of(template: str, folder: Path) -> str:
    with pytest.raises(CallerError) as raised:
        told_by(template, folder)
    assert raised.value.remedy
    return str(raised.value)


@pytest.mark.thorough
@pytest.mark.parametrize(
    "loop",
    [
        "{% for a in range(99999) %}{% for b in range(99999) %}{% for c in range(99999) %}{% endfor %}{% endfor %}{% endfor %}",
        "{% macro again() %}{{ again() }}{{ again() }}{% endmacro %}{{ again() }}",
        "{% set ns = namespace(text='a') %}{% for a in range(99) %}{% set ns.text = ns.text + ns.text %}{% endfor %}",
        "{{ 'a' * 10 ** 12 }}",
        "{{ 9 ** (9 ** 9) }}",
    ],
)
def test_a_template_without_an_end_is_ended(loop: str, tmp_path: Path) -> None:
    said = problem_of(loop + CHATML, tmp_path)
    assert "the-model: chat_template.jinja: the chat template " in said


def test_a_text_without_an_end_is_cut(tmp_path: Path) -> None:
    text = "{% for a in range(99999) %}{{ 'many letters' }}{% endfor %}"
    assert "it makes more than 400,000 characters" in problem_of(text + CHATML, tmp_path)


@pytest.mark.parametrize(
    "attack",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{{ cycler.__init__.__globals__.os.environ }}",
        "{{ lipsum.__globals__['os'].popen('id').read() }}",
        "{{ (strftime_now.__code__).co_name }}",
        "{{ raise_exception.__globals__['json'] }}",
        "{% include '/etc/passwd' %}",
        "{% import 'os' as os %}",
    ],
)
def test_a_template_opens_nothing(attack: str, tmp_path: Path) -> None:
    said = problem_of(attack + CHATML, tmp_path)
    assert "the chat template does not render a question and its answer" in said
    assert "root:" not in said


def test_a_template_sees_no_variable_of_this_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_QUALIFY_PRIVATE_KEY", "s3cret")
    assert "s3cret" not in problem_of("{{ raise_exception(self | string + messages | string) }}" + CHATML, tmp_path)


@pytest.mark.parametrize(
    "broken", ["{% if %}", "{{ messages[5].role }}", "{{ raise_exception('not for you') }}", "no question"]
)
def test_a_template_that_renders_no_question_is_refused_with_its_reason(broken: str, tmp_path: Path) -> None:
    said = problem_of(broken, tmp_path)
    assert "the chat template does not render a question and its answer" in said
    assert "Traceback" not in said


def test_a_reply_ends_where_the_turn_ends(tmp_path: Path) -> None:
    told = told_by(CHATML, tmp_path)
    assert (told.calls, told.thoughts, told.closed) == ([], [], False)


def test_thoughts_that_a_prompt_opens_are_what_the_model_writes(tmp_path: Path) -> None:
    opened = CHATML.replace("assistant\\n' }}{% endif", "assistant\\n<think>\\n' }}{% endif")
    assert told_by(opened, tmp_path).thoughts == [f"{THOUGHT}\n</think>\n\n{ANSWER}"]


def test_thoughts_that_a_prompt_closes_are_none(tmp_path: Path) -> None:
    closed = CHATML.replace("assistant\\n' }}{% endif", "assistant\\n<think>\\n\\n</think>\\n' }}{% endif")
    told = told_by(closed, tmp_path)
    assert (told.thoughts, told.closed) == ([], True)


def test_a_begin_that_markup_shares_is_not_cut_in_it(tmp_path: Path) -> None:
    """`<think>` and `<tool_call>` begin alike."""
    family = read_family("qwen3-next")
    told = ask_template(read_model_files(make_model(family, tmp_path / "it"), "it"))
    assert told.calls[0].startswith("<tool_call>")


def test_a_template_for_tools_is_taken_for_calls(tmp_path: Path) -> None:
    call = "{{ '<call>' + message.tool_calls[0].function.name + ' ' + (message.tool_calls[0].function.arguments | tojson) }}"
    of_tools = CHATML.replace("{{ '<|im_start|>' + message.role", "{{ tools | tojson }}" + "{{ '<|im_start|>' + message.role")
    of_tools = of_tools.replace("{%- endfor %}", "{% if message.tool_calls %}" + call + "{% endif %}{% endfor %}")
    named = [{"name": "default", "template": CHATML}, {"name": "tool_use", "template": of_tools}]
    told = told_by("", tmp_path, tokenizer={"chat_template": named})
    assert NAME in told.calls[0]
    assert not told.hides_tools


@pytest.mark.parametrize("name", [name for name in NAMES if read_family(name).get("template")])
def test_each_familys_template_says_what_the_model_does(name: str, tmp_path: Path) -> None:
    document = read_family(name)
    told = ask_template(read_model_files(make_model(document, tmp_path / name), name))
    expected = document["expected"]
    assert bool(told.thoughts) == expected["thinks"]
    calls = bool(told.calls) and not told.hides_tools and not told.as_text
    # Of Llama 4 no parser reads it.
    assert calls == bool(expected["tools"]) or name == "llama-4"
    for text in told.calls:
        assert NAME in text
        assert "Oslo" in text
        assert not text.endswith((token_text(document["tokenizer"].get("eos_token")) or "\n", "\n"))
