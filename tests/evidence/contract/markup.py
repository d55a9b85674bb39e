"""How the models of each tool-call parser of vLLM write a call of `get_weather` with the city Paris.

Each text is what that parser takes; tests/evidence/contract/test_markup_of_engine.py holds them to vLLM's own parsers.
"""

import re

ARGUMENTS = '{"city": "Paris"}'
NAMED = f'{{"name": "get_weather", "arguments": {ARGUMENTS}}}'
WITH_PARAMETERS = f'{{"name": "get_weather", "parameters": {ARGUMENTS}}}'
PYTHON = '[get_weather(city="Paris")]'
HERMES = f"<tool_call>\n{NAMED}\n</tool_call>"
KEYS_AND_VALUES = "<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Paris</arg_value>\n</tool_call>"
FUNCTION_TAGS = "<tool_call>\n<function=get_weather>\n<parameter=city>\nParis\n</parameter>\n</function>\n</tool_call>"
HUNYUAN = (
    "<tool_calls><tool_call>get_weather<tool_sep><arg_key>city</arg_key><arg_value>Paris</arg_value></tool_call></tool_calls>"
)
COHERE = f'<|START_ACTION|>[\n{{"tool_call_id": "0", "tool_name": "get_weather", "parameters": {ARGUMENTS}}}\n]<|END_ACTION|>'


def _dsml(mark: str, block: str) -> str:
    city = f'<{mark}parameter name="city" string="true">Paris</{mark}parameter>'
    return f'<{mark}{block}>\n<{mark}invoke name="get_weather">\n{city}\n</{mark}invoke>\n</{mark}{block}>'


def _barred(text: str, blank: str = "_") -> str:
    """A text whose tokens have wide bars, as those of DeepSeek and Step, and their blanks."""
    return re.sub(r"<\|(\w+)\|>", lambda token: f"<\uff5c{token[1].replace('_', blank)}\uff5c>", text)


def _deepseek(call: str) -> str:
    return _barred(f"<|tool_calls_begin|><|tool_call_begin|>{call}<|tool_call_end|><|tool_calls_end|>", "\u2581")


CALLS = {
    "apertus": f'<|tools_prefix|>[{{"get_weather": {ARGUMENTS}}}]<|tools_suffix|>',
    "cohere_command3": COHERE,
    "cohere_command4": COHERE,
    "deepseek_v3": _deepseek(f"function<|tool_sep|>get_weather\n```json\n{ARGUMENTS}\n```"),
    "deepseek_v31": _deepseek(f"get_weather<|tool_sep|>{ARGUMENTS}"),
    "deepseek_v32": _dsml("\uff5cDSML\uff5c", "function_calls"),
    "deepseek_v4": _dsml("\uff5cDSML\uff5c", "tool_calls"),
    "deepseek_v41": _dsml("\uff5cDSML\uff5c ", "calls"),
    "dots": '<dots_function_call>\n<invoke name="get_weather">\n<parameter name="city">Paris</parameter>\n</invoke>\n'
    "</dots_function_call>",
    "ernie45": HERMES,
    "functiongemma": "<start_function_call>call:get_weather{city:<escape>Paris<escape>}<end_function_call>",
    "gemma4": '<|tool_call>call:get_weather{city:<|"|>Paris<|"|>}<tool_call|>',
    "gigachat3": f"function call<|role_sep|>\n{NAMED}",
    "glm45": KEYS_AND_VALUES,
    "glm47": KEYS_AND_VALUES,
    "granite": f"<|tool_call|>[{NAMED}]",
    "granite-20b-fc": f"<function_call> {NAMED}",
    "granite4": HERMES,
    "hermes": HERMES,
    "hunyuan_a13b": f"<tool_calls>[{NAMED}]</tool_calls>",
    "hy_v3": HUNYUAN,
    "hy_v4": HUNYUAN.replace("<tool_sep>", ""),
    "inkling": f'<|content_invoke_tool_json|>{{"name": "get_weather", "args": {ARGUMENTS}}}<|end_message|>',
    "internlm": f"<|action_start|><|plugin|>{WITH_PARAMETERS}<|action_end|>",
    "jamba": f"<tool_calls>[{NAMED}]</tool_calls>",
    "k2_horizon": "<ifm|tool_calls><ifm|tool_call>get_weather<ifm|arg_key>city</ifm|arg_key>"
    "<ifm|arg_value>Paris</ifm|arg_value></ifm|tool_call></ifm|tool_calls>",
    "kimi_k2": "<|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0<|tool_call_argument_begin|>"
    f"{ARGUMENTS}<|tool_call_end|><|tool_calls_section_end|>",
    "kimi_k3": '<|open|>tools<|sep|><|open|>call tool="get_weather" index="1"<|sep|>'
    '<|open|>argument key="city" type="string"<|sep|>Paris<|close|>argument<|sep|><|close|>call<|sep|><|close|>tools<|sep|>',
    "lfm2": f"<|tool_call_start|>{PYTHON}<|tool_call_end|>",
    "ling3": KEYS_AND_VALUES,
    "llama3_json": WITH_PARAMETERS,
    "llama4_json": f"<|python_tag|>{WITH_PARAMETERS}",
    "llama4_pythonic": f"<|python_start|>{PYTHON}<|python_end|>",
    "longcat": f"<longcat_tool_call>\n{NAMED}\n</longcat_tool_call>",
    "mimo": "<tool_call>\n<function=get_weather>\n<parameter=city>Paris</parameter>\n</function>\n</tool_call>",
    "minicpm5": '<function name="get_weather"><param name="city">Paris</param></function>',
    "minimax_m2": '<minimax:tool_call>\n<invoke name="get_weather">\n<parameter name="city">Paris</parameter>\n</invoke>\n'
    "</minimax:tool_call>",
    "minimax_m3": ']<]minimax[>[<tool_call>\n]<]minimax[>[<invoke name="get_weather">]<]minimax[>[<city>Paris'
    "]<]minimax[>[</city>]<]minimax[>[</invoke>\n]<]minimax[>[</tool_call>",
    "mistral": f"[TOOL_CALLS][{NAMED}]",
    "muse_glimmer": '<|start|>assistant to=get_weather<|message|><atem:function_calls>\n<atem:invoke name="get_weather">\n'
    '<atem:parameter name="city">Paris</atem:parameter>\n</atem:invoke>\n</atem:function_calls><|eom|>',
    "olmo3": '<function_calls>\nget_weather(city="Paris")\n</function_calls>',
    "openai": f"<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>{ARGUMENTS}<|call|>",
    "phi4_mini_json": f"functools[{NAMED}]",
    "plamo3": "<|plamo:begin_tool_requests:plamo|><|plamo:begin_tool_request:plamo|><|plamo:begin_tool_name:plamo|>get_weather"
    "<|plamo:end_tool_name:plamo|><|plamo:begin_tool_arguments:plamo|><|plamo:constrain|>json<|plamo:msg|>"
    f"{ARGUMENTS}<|plamo:end_tool_arguments:plamo|><|plamo:end_tool_request:plamo|><|plamo:end_tool_requests:plamo|>",
    "poolside_v1": KEYS_AND_VALUES,
    "pythonic": PYTHON,
    "qwen3_coder": FUNCTION_TAGS,
    "qwen3_json": HERMES,
    "qwen3_xml": FUNCTION_TAGS,
    "seed_oss": "<seed:tool_call>\n<function=get_weather>\n<parameter=city>Paris</parameter>\n</function>\n</seed:tool_call>",
    "step3": _barred(
        '<|tool_calls_begin|><|tool_call_begin|>function<|tool_sep|><steptml:invoke name="get_weather">'
        '<steptml:parameter name="city">Paris</steptml:parameter></steptml:invoke><|tool_call_end|><|tool_calls_end|>'
    ),
    "step3p5": FUNCTION_TAGS,
    "xlam": f"[{NAMED}]",
}
# What the same parsers take of models with other tokenizers or templates.
OTHER_CALLS = {
    "mistral, since v11": f"[TOOL_CALLS]get_weather{ARGUMENTS}",
    "mistral, with an id": f"[TOOL_CALLS]get_weather[CALL_ID]abcdefghi[ARGS]{ARGUMENTS}",
    "llama3_json, with its token": f"<|python_tag|>{WITH_PARAMETERS}",
    "k2_horizon, json": f"<ifm|tool_calls><ifm|tool_call>{NAMED}</ifm|tool_call></ifm|tool_calls>",
    "granite, as hermes": HERMES,
    "openai, the recipient first": "<|start|>assistant to=functions.get_weather<|channel|>commentary json<|message|>"
    f"{ARGUMENTS}<|call|>",
    "two in Python": '[get_weather(city="Paris"), get_weather(city="Rome")]',
    "in a fence": f"```json\n{NAMED}\n```",
    "as OpenAI writes it": '{"type": "function", "function": {"name": "get_weather", "arguments": "{}"}}',
}
# Parsers whose form is not known here, each with the reason.
UNKNOWN = {"hf": "the form is the model's own, in its response template"}
# Parsers that cannot be asked, each with the reason.
NOT_ASKED = {
    "cohere_command3": "the class reads nothing itself: cohere-melody does, which is not in the engine environment",
    "cohere_command4": "as cohere_command3",
    "openai": "the class reads nothing itself: vLLM's HarmonyParser does, by the tokens of gpt-oss",
}
