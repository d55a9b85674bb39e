"""Recipe drift, on the tables that versions of vLLM made of themselves."""

import pytest
from pydantic import JsonValue

from vllm_qualify.drift.finding import Finding, changed_defaults, check_server, refusal_finding
from vllm_qualify.drift.probe import variables_read
from vllm_qualify.errors import CallerError, HostError
from vllm_qualify.recipe.loading import catalog_names, load_recipe
from vllm_qualify.recipe.serving import Environment, ServerArguments
from vllm_qualify.recipe.tables import known_versions, parse_answer, table_of

OLDEST, NEWEST = "0.12.0", known_versions()[-1]


def cells(name: str, version: str) -> list[tuple[str, ServerArguments, Environment]]:
    """Every cell of a recipe that can be at a version, with its arguments and environment for it."""
    recipe = load_recipe(name).recipe
    planned = []
    for gpu_type, variant, profile in recipe.cells(version):
        serving = recipe.gpu_types[gpu_type]
        layers = [layer.for_version(version) for layer in (serving, recipe.variants[variant], serving.profiles[profile])]
        server = layers[0][0] | layers[1][0] | layers[2][0]
        environment = layers[0][1] | layers[1][1] | layers[2][1]
        planned.append((f"{gpu_type}/{variant}/{profile}", server, environment))
    return planned


@pytest.mark.parametrize("version", known_versions())
@pytest.mark.parametrize("name", catalog_names())
def test_every_recipe_of_the_catalog_fits_every_version_that_has_a_table(name: str, version: str) -> None:
    problems = {
        cell: check_server(server, environment, table_of(version)) for cell, server, environment in cells(name, version)
    }
    assert {cell: texts for cell, texts in problems.items() if texts} == {}


PASSES = ("enable_fi_allreduce_fusion", "enable_attn_fusion", "enable_noop")
# What vllm-project/recipes gives for v0.12.0.
GUIDES: dict[str, tuple[ServerArguments, Environment]] = {
    "llama": (
        {
            "kv-cache-dtype": "fp8",
            "async-scheduling": True,
            "no-enable-prefix-caching": True,
            "max-num-batched-tokens": 8192,
            "compilation-config": {"pass_config": dict.fromkeys(PASSES, True)},
        },
        {"VLLM_USE_FLASHINFER_MOE_FP8": "1", "VLLM_USE_FLASHINFER_MOE_FP4": "1"},
    ),
    "nemotron": (
        {"trust-remote-code": True, "kv-cache-dtype": "fp8", "mamba-ssm-cache-dtype": "float32"},
        {"VLLM_USE_FLASHINFER_MOE_FP8": "1", "VLLM_FLASHINFER_MOE_BACKEND": "throughput"},
    ),
}


def test_the_guides_settings_fit_their_own_version_and_each_problem_is_named_at_the_newest() -> None:
    assert [finding for guide in GUIDES.values() for finding in check_server(*guide, table_of(OLDEST))] == []
    findings = {finding.name: finding for guide in GUIDES.values() for finding in check_server(*guide, table_of(NEWEST))}
    variables = {"VLLM_USE_FLASHINFER_MOE_FP8", "VLLM_USE_FLASHINFER_MOE_FP4", "VLLM_FLASHINFER_MOE_BACKEND"}
    assert set(findings) == {"compilation-config.pass_config", *variables}
    assert [name for name in PASSES if name not in findings["compilation-config.pass_config"].told] == []
    assert findings["VLLM_FLASHINFER_MOE_BACKEND"].told.endswith("not read VLLM_FLASHINFER_MOE_BACKEND, so it has no effect")
    assert [name for name, finding in findings.items() if finding.is_problem] == ["compilation-config.pass_config"]


@pytest.mark.parametrize("version", [OLDEST, NEWEST])
def test_an_unknown_variable_is_a_note_unless_the_server_refuses_it(version: str) -> None:
    """vllm/envs.py, validate_environ: without the flag it warns. 0.12 has no such flag."""
    table, environment = table_of(version), {"VLLM_NO_SUCH_VARIABLE": "1", "NCCL_NO_SUCH_VARIABLE": "1"}
    (note,) = check_server({}, environment, table)
    assert (note.kind, note.name, note.is_problem) == ("unknown-environment", "VLLM_NO_SUCH_VARIABLE", False)
    strict = check_server({"fail-on-environ-validation": True}, environment, table)
    kinds = {finding.kind for finding in strict if finding.is_problem}
    assert kinds == {"unknown-option" if version == OLDEST else "refused-environment"}


def test_a_variable_that_vllm_reads_without_listing_it_has_an_effect() -> None:
    """0.12 reads it in vllm/model_executor/layers/batch_invariant.py alone."""
    assert check_server({}, {"VLLM_BATCH_INVARIANT": "1"}, table_of("0.12.0")) == []


@pytest.mark.parametrize(
    ("server", "kind", "message"),
    [
        ({"max-num-sequences": 8}, "unknown-option", "no option --max-num-sequences; the nearest is max-num-seqs"),
        ({"swap-space": 4}, "unknown-option", "no option --swap-space"),
        ({"uvicorn-log-level": "loud"}, "bad-value", "it takes one of"),
        ({"gpu-memory-utilization": 1.5}, "bad-value", "1.5 is greater than the maximum of 1"),
        ({"max-num-seqs": 0}, "bad-value", "0 is less than the minimum of 1"),
        ({"max-num-seqs": "many"}, "bad-value", "it takes a whole number"),
        ({"max-num-seqs": 1.5}, "bad-value", "it takes a whole number"),
        ({"max-num-seqs": [1, 2]}, "spare-value", "it takes one value"),
        ({"max-num-seqs": True}, "bad-value", "it takes a value"),
        ({"enable-prefix-caching": "yes"}, "bad-value", "it is a flag"),
        ({"headless": False}, "bad-value", "it cannot be switched off"),
        ({"disable-prefix-caching": False}, "bad-value", "give its opposite"),
        ({"max-num-seqs": {"a": 5}}, "bad-value", "it takes no mapping"),
        ({"enable-prefix-caching": {"a": 5}}, "bad-value", "it is a flag"),
        ({"gpu-memory-utilization": "abc"}, "bad-value", "it takes a number"),
        ({"gpu-memory-utilization": "1.5"}, "bad-value", "1.5 is greater than the maximum of 1"),
        ({"max-model-len": "abc"}, "bad-value", "it takes a whole number, one like 32k, or auto"),
        ({"compilation-config": '{"modes": 3}'}, "unknown-field", "no field modes"),
        ({"kernel-config": {"enable_flashinfer_autotune": "maybe"}}, "bad-value", "enable_flashinfer_autotune"),
        ({"speculative-config": {"method": "ngram", "num_speculative_tokens": "four"}}, "bad-value", "num_speculative_tokens"),
        ({"speculative-config": {"method": "ngram", "num_speculative_tokens": "0"}}, "bad-value", "num_speculative_tokens"),
        ({"compilation-config": {"cudagraph_capture_sizes": ["1.5"]}}, "bad-value", "cudagraph_capture_sizes"),
        ({"compilation-config.modes": 3}, "unknown-field", "no field modes"),
        ({"compilation-config.pass_config.enable_noop": True}, "bad-value", "enable_noop"),
        ({"enable-prefix-caching": True, "no-enable-prefix-caching": True}, "bad-value", "are one option"),
        ({"compilation-config": {"modes": 3}}, "unknown-field", "no field modes"),
        ({"compilation-config": {"cudagraph_capture_sizes": "all"}}, "bad-value", "cudagraph_capture_sizes"),
    ],
)
def test_what_a_version_does_not_take_is_reported(server: ServerArguments, kind: str, message: str) -> None:
    (finding,) = check_server(server, {}, table_of(NEWEST))
    assert finding.kind == kind
    assert message in finding.told


@pytest.mark.parametrize(
    "server",
    [
        {"max-model-len": "32k"},
        {"max-model-len": 2048},
        {"no-enable-prefix-caching": True},
        {"enable-prefix-caching": False},
        {"no-enable-prefix-caching": False},
        {"max-model-len": "auto"},
        {"gpu-memory-utilization": ".9"},
        {"compilation-config": {"cudagraph_mode": "FULL_DECODE_ONLY", "mode": "vllm_compile"}},
        {"compilation-config": '{"mode": 3}'},
        {"compilation-config.mode": 3},
        {"attention-config": {"backend": "FLASHINFER"}},
        {"speculative-config": {"method": "ngram", "num_speculative_tokens": 4}},
        {"compilation-config": {"pass_config": {"eliminate_noops": True}}},
        # Text that vLLM reads as a boolean or a number. Published options of vllm-project/recipes:
        # models/thinkingmachines/Inkling.yaml, models/deepseek-ai/DeepSeek-V4-Flash.yaml.
        {"kernel-config": {"enable_flashinfer_autotune": "False"}},
        {"speculative-config": {"method": "ngram", "num_speculative_tokens": "4"}},
        {"compilation-config": {"cudagraph_capture_sizes": ["1", "2"]}},
    ],
)
def test_what_a_version_takes_is_no_finding(server: ServerArguments) -> None:
    assert check_server(server, {}, table_of(NEWEST)) == []


@pytest.mark.parametrize(("value", "kinds"), [("True", []), (2, ["bad-value"])])
def test_a_boolean_of_an_older_version_may_be_text_too(value: JsonValue, kinds: list[str]) -> None:
    findings = check_server({"attention-config": {"use_fp4_indexer_cache": value}}, {}, table_of("0.26.0"))
    assert [finding.kind for finding in findings] == kinds


def test_a_counter_that_went_is_reported() -> None:
    table = table_of(NEWEST)
    gone = table.model_copy(update={"metrics": [name for name in table.metrics if name != "vllm:num_preemptions"]})
    (finding,) = check_server({}, {}, gone)
    assert (finding.kind, finding.name, finding.is_problem) == ("unknown-metric", "vllm:num_preemptions", True)


def changed(server: ServerArguments) -> dict[str, Finding]:
    return {finding.name: finding for finding in changed_defaults(server, table_of(OLDEST), table_of(NEWEST))}


def test_a_default_that_changed_is_reported_where_the_recipe_leaves_it_alone() -> None:
    finding = changed({})["gpu-memory-utilization"]
    assert finding.told == f"--gpu-memory-utilization is 0.9 by default in 0.12.0 and 0.92 in {NEWEST}"
    assert not finding.is_problem
    assert "gpu-memory-utilization" not in changed({"gpu-memory-utilization": 0.9})
    assert "async-scheduling" in changed({})
    assert "async-scheduling" not in changed({"no-async-scheduling": True})
    # vLLM's own configuration of a model with Mamba layers; the option's default says nothing of it.
    caching = changed({})["enable-prefix-caching"]
    assert "is false by default in 0.12.0 and true" in caching.told
    assert caching.told.endswith("for models with Mamba layers")
    assert "enable-prefix-caching" not in changed({"no-enable-prefix-caching": True})


def test_of_a_configuration_only_the_fields_that_the_recipe_leaves_alone_are_reported() -> None:
    fields = {name for name in changed({}) if name.startswith("compilation-config.")}
    assert fields
    field = min(fields)
    given: ServerArguments = {"compilation-config": {field.removeprefix("compilation-config."): None}}
    assert {name for name in changed(given) if name.startswith("compilation-config.")} == fields - {field}


@pytest.mark.parametrize(("is_of_this_build", "kind"), [(True, "refused"), (False, "perhaps-refused")])
def test_what_another_build_refuses_is_no_problem_yet(is_of_this_build: bool, kind: str) -> None:
    finding = refusal_finding("they refuse each other\nand more", "0.32.0", is_of_this_build)
    assert (finding.kind, finding.is_problem) == (kind, is_of_this_build)
    assert finding.told.endswith(": they refuse each other")


# --- tables


def test_the_catalog_has_tables_from_the_oldest_version_on_for_patch_releases_too() -> None:
    assert known_versions()[0] == OLDEST
    of_others = {"0.12.3": "0.12.0", "0.32.0+cpu": "0.32.0"}
    for asked, expected in {**dict(zip(known_versions(), known_versions(), strict=True)), **of_others}.items():
        table = table_of(asked)
        assert table.version == expected
        assert all(table.registries.values())
        assert "hermes" in table.registries["tool-call-parser"]


@pytest.mark.parametrize("asked", ["0.11.0", "1.0.0", "newest"])
def test_a_version_without_a_table_is_reported(asked: str) -> None:
    with pytest.raises(CallerError):
        table_of(asked)


@pytest.mark.parametrize("answer", ["", "{}", "Traceback (most recent call last):", '{"version": 1}'])
def test_an_answer_that_is_no_table_is_reported(answer: str) -> None:
    with pytest.raises(HostError, match="did not report what it knows"):
        parse_answer(answer)


def test_metric_names_that_went_are_gone_from_the_newest_table() -> None:
    old, new = set(table_of(OLDEST).metrics), set(table_of(NEWEST).metrics)
    assert "vllm:time_per_output_token_seconds" in old - new
    assert "vllm:request_time_per_output_token_seconds" in new


# Published options of vllm-project/recipes (models/Google/gemma-4-31B-it.yaml, ByteDance-Seed/Seed-OSS-36B-Instruct.yaml).
CONNECTOR = "kv-transfer-config.kv_connector"
GEMMA: ServerArguments = {"enable-auto-tool-choice": True, "tool-call-parser": "gemma4", "reasoning-parser": "gemma4"}


def test_a_parser_that_a_version_has_not_registered_is_a_problem() -> None:
    findings = check_server(GEMMA, {}, table_of("0.12.0"))
    parsers = ("reasoning-parser", "tool-call-parser")
    assert [(finding.kind, finding.name) for finding in findings] == [("unregistered-name", name) for name in parsers]
    assert all(finding.is_problem and "gemma4" in finding.told for finding in findings)
    assert check_server(GEMMA, {}, table_of("0.33.0")) == []
    assert check_server({"enable-auto-tool-choice": True, "tool-call-parser": "seed_oss"}, {}, table_of("0.12.0")) == []


@pytest.mark.parametrize(
    "server",
    [
        # vLLM looks up a tool parser only where tools are chosen automatically.
        {"tool-call-parser": "gemma4"},
        # A plugin may register the name.
        GEMMA | {"tool-parser-plugin": "/parsers.py", "reasoning-parser-plugin": "/parsers.py"},
        {"kv-transfer-config": {"kv_connector": "Mine", "kv_role": "kv_both", "kv_connector_module_path": "mine"}},
        {"load-format": "AUTO"},
    ],
)
def test_names_that_are_not_looked_up_or_that_a_plugin_may_register_are_no_problem(server: ServerArguments) -> None:
    assert check_server(server, {}, table_of("0.12.0")) == []


@pytest.mark.parametrize(
    ("server", "name"),
    [
        ({"kv-transfer-config": {"kv_connector": "MooncakeStoreConnector", "kv_role": "kv_both"}}, CONNECTOR),
        ({CONNECTOR: "MooncakeStoreConnector"}, CONNECTOR),
        ({"load-format": "instanttensor"}, "load-format"),
        ({"quantization": "humming"}, "quantization"),
    ],
)
def test_other_parts_are_looked_up_in_their_registries(server: ServerArguments, name: str) -> None:
    (finding,) = check_server(server, {}, table_of("0.12.0"))
    assert (finding.kind, finding.name) == ("unregistered-name", name)
    assert check_server(server, {}, table_of("0.33.0")) == []


def test_none_is_no_reasoning_parser_for_a_version_that_reads_it_so() -> None:
    newer, older = (check_server({"reasoning-parser": "None"}, {}, table_of(version)) for version in ("0.33.0", "0.12.0"))
    assert (newer, [finding.kind for finding in older]) == ([], ["unregistered-name"])


def test_a_flag_without_the_option_that_it_requires_is_a_problem() -> None:
    (finding,) = check_server({"enable-auto-tool-choice": True}, {}, table_of("0.12.0"))
    assert (finding.kind, finding.told) == ("missing-option", "--enable-auto-tool-choice requires --tool-call-parser")
    assert check_server({"enable-log-outputs": True, "enable-log-requests": True}, {}, table_of("0.12.0")) == []
    off: ServerArguments = {"enable-log-outputs": True, "no-enable-log-requests": True}
    assert [each.kind for each in check_server(off, {}, table_of("0.12.0"))] == ["missing-option"]
    assert check_server({"no-enable-log-outputs": True}, {}, table_of("0.12.0")) == []


@pytest.mark.parametrize("config", [{"use_inductor": False}, {"pass_config": {"enable_nothing": True}}])
def test_a_field_that_a_version_ignores_is_only_reported(config: dict[str, JsonValue]) -> None:
    """The classes of 0.12 take any field; models/inclusionAI/Ring-1T-FP8.yaml of vllm-project/recipes has the first."""
    (finding,) = check_server({"compilation-config": config}, {}, table_of("0.12.0"))
    assert (finding.kind, finding.is_problem) == ("ignored-field", False)
    (finding,) = check_server({"compilation-config": config}, {}, table_of("0.16.0"))
    assert finding.is_problem


@pytest.mark.parametrize(
    ("source", "is_read"),
    [
        ('os.environ["VLLM_A"]', True),
        ('os.environ.get("VLLM_A", "0")', True),
        ('environment = os.getenv(\n    "VLLM_A"\n)', True),
        ('if "VLLM_A" in os.environ: pass', True),
        ('os.environ["VLLM_A"] = "1"', False),
        ('print("os.environ has no VLLM_A")', False),
        ('mine.get("VLLM_A")', False),
    ],
)
def test_a_variable_counts_where_the_source_reads_it(source: str, is_read: bool) -> None:
    assert variables_read(f"import os\n{source}\n") == ({"VLLM_A"} if is_read else set())
