"""vLLM, from an environment or in its image. Its log's wordings are those of 0.12 to 0.33; some differ between GPU and CPU."""

import ast
import json
import re

from pydantic import JsonValue

from vllm_qualify.engine.kinds import base
from vllm_qualify.engine.kinds.base import IDENTITY, Conditions, Counted, EngineKind, Identity, ServedModel, StartLog
from vllm_qualify.errors import RecipeError
from vllm_qualify.recipe.metrics import PREEMPTIONS, PREFIX_HITS, PREFIX_QUERIES
from vllm_qualify.recipe.serving import VLLM, ServerArguments

# vLLM's documentation, "Optimization and Tuning", section "Preemption".
PREEMPTION_REMEDY = (
    "raise gpu-memory-utilization, lower max-num-seqs or max-num-batched-tokens, "
    "or raise tensor-parallel-size or pipeline-parallel-size"
)

_WITHOUT_HITS = "add no-enable-prefix-caching to the server, or measure prompts that are drawn anew for each repeat"


def _make_config(served: ServedModel, options: ServerArguments) -> ServerArguments:
    ours: ServerArguments = {
        "model": served.model,
        "served-model-name": [served.name, *served.aliases],
        "host": served.host,
        "port": served.port,
    }
    commits: ServerArguments = {"revision": served.revision, "tokenizer-revision": served.tokenizer_revision}
    return ours | {name: commit for name, commit in commits.items() if commit} | options


def _write_config(config: ServerArguments) -> str:
    """Write a mapping as the JSON text that its option takes: vLLM before 0.16 would give the option Python's form of it.

    A false flag is written by its opposite name: older versions ignore a flag that is false, and use their default. Fields
    that are given by names with dots become one mapping: in a config file vLLM reads no value behind such a name that is true.
    """
    written: ServerArguments = {}
    for name, value in _nest_fields(config).items():
        if value is False:
            written[name.removeprefix("no-") if name.startswith("no-") else f"no-{name}"] = True
        else:
            written[name] = json.dumps(value) if isinstance(value, dict) else value
    return base.plain_text(written)


def _nest_fields(config: ServerArguments) -> ServerArguments:
    """The same options with `compilation-config.pass_config.enable_sp` as a field in the mapping of `compilation-config`."""
    nested: ServerArguments = {name: value for name, value in config.items() if "." not in name}
    # A shorter name first, so that it does not replace what a longer one sets within it.
    for name in sorted((name for name in config if "." in name), key=lambda name: name.count(".")):
        option, *path = name.split(".")
        nested[option] = _set_field(nested.get(option), name, path, _read_field(config[name]))
    return nested


def _read_field(value: JsonValue) -> JsonValue:
    """As vLLM reads the value behind a name with dots: JSON, else text."""
    try:
        return json.loads(value) if isinstance(value, str) else value
    except (ValueError, RecursionError):
        return value


def _set_field(mapping: JsonValue, name: str, path: list[str], value: JsonValue) -> JsonValue:
    if not path:
        return value
    try:
        fields = json.loads(mapping) if isinstance(mapping, str) else mapping or {}
    except (ValueError, RecursionError):
        fields = mapping
    if not isinstance(fields, dict):
        raise RecipeError(f"{name} is given, and beside it {mapping!r}, which is no mapping", "give one of the two", "server")
    return {**fields, path[0]: _set_field(fields.get(path[0]), name, path[1:], value)}


def _load_problems(counted: Counted, under: Conditions) -> list[str]:
    preemptions, queries, hits = KIND.total("preemptions"), KIND.total("prefix_queries"), KIND.total("prefix_hits")
    # A server without a prefix cache need not count its hits; one that counts them does so from its start.
    of_cache = {queries, hits} & (counted.before.keys() | counted.after.keys())
    if missing := counted.missing({preemptions} | of_cache):
        return missing
    problems = []
    if preempted := counted.gained(preemptions):
        problems.append(f"{preempted:.0f} preemptions: the KV cache is too small for this load: {PREEMPTION_REMEDY}")
    hit, asked = counted.gained(hits), counted.gained(queries)
    problem = base.hit_problem(f"{hit:.0f} of {asked:.0f} prefix-cache queries hit", hit, asked, under, _WITHOUT_HITS)
    return [*problems, *([problem] if problem else [])]


def _hit_share(counted: Counted) -> float | None:
    hits, queries = (counted.gained(KIND.total(name)) for name in ("prefix_hits", "prefix_queries"))
    return hits / queries if queries > 0 else None


# Bounded, like every number in a log: it must not take long to match, or be too large for a number.
_S = r"(?P<s>\d{1,9}(?:\.\d{1,9})?)"

START_LOG = StartLog(
    # The time stamp has no year and no time zone. Before it come the process, and a prefix that may be configured.
    line=re.compile(
        r"(?:\((?P<process>(?=[^()\n]{0,80}\bpid=\d)[^()\n]{1,160})\) )?"
        r"(?:DEBUG|INFO|WARNING|ERROR) \d\d-\d\d (?P<h>\d\d):(?P<min>\d\d):(?P<s>\d\d) \[[^\]]*\] (?P<message>.*)"
    ),
    # The second wording is that of vLLM's newer model runner, V2.
    begins=re.compile(r"Starting to load model |Loading model from scratch"),
    # It includes a download, a draft model and the processing of the weights. The CPU's runner logs only the reading.
    loaded=re.compile(rf"Model loading took .{{1,40}}? and {_S} seconds"),
    read=re.compile(rf"Loading weights took {_S} seconds"),
    # One line for each compiled model, also a draft model. In older versions `takes` covers all models until then.
    compiled=re.compile(rf"torch\.compile (?:and initial profiling(?:/warmup)? run (?:together )?)?took {_S} s in total"),
    compiled_so_far=re.compile(rf"torch\.compile takes {_S} s in total"),
    # The CPU's runner logs nothing else about it.
    warms_up=re.compile(r"Warming up model for the compilation"),
    warmed_up=re.compile(r"Warming up done"),
    # Newer versions capture some graphs twice, the first time to measure their memory.
    captured=re.compile(rf"Graph capturing finished in {_S} secs"),
    from_cache=re.compile(r"Directly load (?:the compiled graph\(s\)|AOT compilation)"),
    anew=re.compile(r"Compiling a graph for |[Ss]aved AOT compiled function|Compiling model again due to a load failure"),
    eager=re.compile(r"enforce_eager=True"),
    eager_option="enforce-eager",
    # In older versions each is on its own line. The text before them is `GPU`, `CPU` or another device.
    kv_tokens=re.compile(r"KV cache size: (?P<tokens>\d[\d,]{0,20}) tokens"),
    kv_concurrency=re.compile(r"Maximum concurrency for [\d,]{1,20} tokens per request: (?P<times>\d{1,12}(?:\.\d{1,9})?)x"),
)

_TEXT = r"""(?:'(?:[^'\\]|\\.){0,4096}'|"(?:[^"\\]|\\.){0,4096}")"""
# How each engine process describes what it serves, when it has parsed all options. Other settings may stand between these.
_SERVES = re.compile(
    rf"Initializing a V\d LLM engine \([^)\n]{{0,80}}\) with config: model=(?P<model>{_TEXT}), "
    rf"speculative_config=(?:None|SpeculativeConfig\(method={_TEXT}, model=(?P<draft>None|{_TEXT}), [^)\n]{{1,200}}\)), "
    rf"tokenizer=(?P<tokenizer>None|{_TEXT}), (?:\w+=\w+, ){{0,8}}?revision=(?P<revision>[^\s,]{{1,200}}), "
    rf"(?:\w+=[\w{{}}]+, ){{0,8}}?tokenizer_revision=(?P<tokenizer_revision>[^\s,]{{1,200}}), "
    rf"(?:\w+=[\w{{}}]+, ){{0,8}}?trust_remote_code=(?P<trust_remote_code>True|False), "
)


def _find_identities(log: str) -> list[Identity]:
    lines = (START_LOG.line.match(line) for line in log.splitlines())
    matches = (_SERVES.match(line["message"]) for line in lines if line)
    return [{name: _unquote(match[name]) for name in IDENTITY} for match in matches if match]


def _unquote(written: str | None) -> str | None:
    if written in (None, "None"):
        return None
    return str(ast.literal_eval(written)) if written[:1] in "'\"" else written


KIND = EngineKind(
    name=VLLM,
    title="vLLM",
    package="vllm",
    example_image="vllm/vllm-openai:v0.32.0",
    pins_draft=True,
    needs_image=False,
    has_client=True,
    scores_prompts=True,
    has_tables=True,
    parallel=("tensor-parallel-size", "pipeline-parallel-size", "data-parallel-size", "prefill-context-parallel-size"),
    concurrency="max-num-seqs",
    trust_remote_code="trust-remote-code",
    speculative="speculative-config",
    repositories=("tokenizer",),
    # Its configuration is read at the revision of the model, which another repository does not have; an adapter at none.
    unpinned=("hf-config-path", "generation-config", "lora-modules", "default-mm-loras"),
    files=("chat-template", "tool-parser-plugin", "reasoning-parser-plugin", "structured-outputs-config"),
    metrics_path="/metrics",
    counters={
        "running": ("vllm:num_requests_running",),
        "waiting": ("vllm:num_requests_waiting",),
        # The second name is that of vLLM's first engine.
        "kv_cache_usage": ("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc"),
        "preemptions": (PREEMPTIONS,),
        "prefix_queries": (PREFIX_QUERIES, "vllm:gpu_prefix_cache_queries"),
        "prefix_hits": (PREFIX_HITS, "vllm:gpu_prefix_cache_hits"),
        # What a connector brought back, like native offload.
        "external_hits": ("vllm:external_prefix_cache_hits",),
        "prompt_tokens": ("vllm:prompt_tokens",),
        "generation_tokens": ("vllm:generation_tokens",),
        "drafts": ("vllm:spec_decode_num_drafts",),
        "draft_tokens": ("vllm:spec_decode_num_draft_tokens",),
        "accepted_tokens": ("vllm:spec_decode_num_accepted_tokens",),
        "accepted_tokens_per_position": ("vllm:spec_decode_num_accepted_tokens_per_pos",),
        "succeeded": ("vllm:request_success",),
    },
    load_problems=_load_problems,
    hit_share=_hit_share,
    config=_make_config,
    text=_write_config,
    arguments=lambda _served, config: ["--config", config],
    queue_remedy="raise max-num-batched-tokens or gpu-memory-utilization, or use more GPUs",
    start_log=START_LOG,
    identities=_find_identities,
    opens_with_role=True,
    is_held_to_contract=True,
)
