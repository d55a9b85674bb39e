"""What was qualified, in the forms that people deploy: read back by a shell, by YAML, and by vLLM's own parser."""

import json
import re
import subprocess
from itertools import pairwise
from pathlib import Path
from typing import Any, get_args

import pytest
import yaml
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.builders.server_plans import AWKWARD, DIGEST, IMAGE, PROCESS, plan, run_by_a_shell
from tests.engine.script import run_script
from vllm_qualify.approval.formats import deployable
from vllm_qualify.approval.layout import Format
from vllm_qualify.engine.containers.plan import command_line
from vllm_qualify.engine.environment import EngineEnvironment
from vllm_qualify.engine.server import ServerPlan, config_text, container_of
from vllm_qualify.errors import CallerError

ANNOTATIONS = {"cell": "tiny/bf16/h200/balanced", "run": "20260101-000000-abcdef", "expires": "2026-07-01"}
HUB_CACHE = "${HF_HOME:-${HOME}/.cache/huggingface}/hub"

# What a command line and a variable can hold at all.
texts = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"])) | st.sampled_from(AWKWARD)


LOCAL = plan(
    model="/models/tiny: $1, a",
    revision=None,
    arguments={"speculative-config": {"model": "/models/draft", "num_speculative_tokens": 2}},
)
TENSORRT_LLM = plan(kind="tensorrt-llm", arguments={"max_batch_size": 4, "kv_cache_config": {"free_gpu_memory_fraction": 0.5}})


def rendered(server: ServerPlan, form: Format) -> str:
    return deployable(server, form, "tiny-bf16", ANNOTATIONS)


def after(command: list[str], option: str) -> list[str]:
    return [word for before, word in pairwise(command) if before == option]


def service_of(server: ServerPlan) -> tuple[dict[str, Any], str]:
    """The Compose service and its config file's content."""
    file = yaml.safe_load(rendered(server, "compose"))
    (service,) = file["services"].values()
    return service, file["configs"]["server"]["content"]


def objects_of(server: ServerPlan) -> dict[str, dict[str, Any]]:
    return {one["kind"]: one for one in yaml.safe_load_all(rendered(server, "kubernetes"))}


def pod_of(server: ServerPlan) -> tuple[dict[str, Any], dict[str, Any]]:
    """The pod and its one container."""
    pod = objects_of(server)["Deployment"]["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    return pod, container


def undoubled(text: str) -> str:
    """As Compose and Kubernetes read it, which would take a lone dollar for a variable's."""
    assert "$" not in text.replace("$$", "")
    return text.replace("$$", "$")


# --- config


@pytest.mark.parametrize("server", [plan(), LOCAL, TENSORRT_LLM, plan(engine=PROCESS)])
def test_the_config_file_is_the_servers_own_after_a_comment(server: ServerPlan) -> None:
    comment, _, rest = rendered(server, "config").partition("\n")
    assert rest == config_text(server, 8000)
    assert comment.startswith("# cell tiny/bf16/h200/balanced; run 20260101-000000-abcdef; expires 2026-07-01; ")


def test_the_config_file_names_the_command_that_reads_it() -> None:
    def command(server: ServerPlan) -> str:
        return rendered(server, "config").partition("\n")[0].rpartition("; ")[2]

    assert command(plan(engine=PROCESS)) == "env VLLM_LOGGING_LEVEL=DEBUG vllm serve --config FILE"
    assert command(plan()) == f"vllm/vllm-openai@{DIGEST} --config FILE"
    assert command(TENSORRT_LLM).startswith(f"vllm/vllm-openai@{DIGEST} trtllm-serve serve some/model ")


@pytest.mark.thorough
@given(texts, texts)
@example("2026\nhost: evil\x85more: evil", "a\u2028b: c")
def test_no_text_leaves_the_comment(expires: str, variable: str) -> None:
    forms: dict[Format, ServerPlan] = {"config": plan(engine=PROCESS, environment={"A": variable}), "compose": plan()}
    for form, server in forms.items():
        commented, plain = (deployable(server, form, "tiny", about) for about in ({"expires": expires}, {}))
        assert yaml.safe_load(commented) == yaml.safe_load(plain)
        assert commented.startswith("# expires")


# --- docker


def test_the_docker_line_is_the_qualified_container_with_flags_for_its_file() -> None:
    server = plan()
    command = run_by_a_shell(rendered(server, "docker"), {"HF_HOME": "/hub"})
    qualified = command_line(container_of(server, Path("server.yaml"), 4711, {}))
    assert command[command.index(IMAGE.pinned) + 1 :] == [
        *("--host", "0.0.0.0"),
        *("--max-model-len", "64"),
        *("--model", "some/model"),
        "--no-enable-prefix-caching",
        *("--port", "8000"),
        *("--revision", "0" * 40),
        *("--served-model-name", "tiny"),
        *("--tokenizer-revision", "0" * 40),
    ]
    for option in ("--platform", "--memory", "--shm-size", "--cap-drop", "--cap-add", "--security-opt"):
        assert after(command, option) == after(qualified, option) != []
    assert after(command, "--gpus") == ["2"], "how many, not which"
    assert after(command, "--publish") == ["8000:8000"]
    assert after(command, "--volume") == ["/hub/hub:/root/.cache/huggingface/hub"]
    of_the_user = run_by_a_shell(rendered(server, "docker"), {"HOME": "/home/a b"})
    assert after(of_the_user, "--volume") == ["/home/a b/.cache/huggingface/hub:/root/.cache/huggingface/hub"]
    assert after(command, "--name") == ["tiny-bf16"]
    assert "VLLM_LOGGING_LEVEL=DEBUG" in after(command, "--env")
    assert {"HF_TOKEN", "HF_ENDPOINT", "HF_HUB_OFFLINE"} <= set(after(command, "--env")), "as they are where it runs"
    # What the qualification's own container is labelled with stays there.
    assert after(command, "--label") == [f"vllm-qualify/{key}={value}" for key, value in ANNOTATIONS.items()]
    assert not {"--restart", "--mount", "--config"} & set(command)


def test_local_weights_are_mounted_where_the_server_expects_them() -> None:
    command = run_by_a_shell(rendered(LOCAL, "docker"), {})
    assert after(command, "--mount") == [
        'type=bind,"source=/models/tiny: $1, a",target=/vllm-qualify/model,readonly',
        "type=bind,source=/models/draft,target=/vllm-qualify/draft,readonly",
    ]
    assert after(command, "--model") == ["/vllm-qualify/model"]
    assert json.loads(after(command, "--speculative-config")[0])["model"] == "/vllm-qualify/draft"
    assert after(command, "--volume") == []


def test_a_variable_of_the_plan_is_not_taken_from_the_shell() -> None:
    server = plan(environment={"HF_HUB_OFFLINE": "1"})
    command, (service, _) = run_by_a_shell(rendered(server, "docker"), {"HF_HOME": "/hub"}), service_of(server)
    assert [entry for entry in after(command, "--env") if entry.startswith("HF_HUB_OFFLINE")] == ["HF_HUB_OFFLINE=1"]
    assert (service["environment"]["HF_HUB_OFFLINE"], service["environment"]["HF_TOKEN"]) == ("1", None)


@given(st.lists(texts, min_size=1, max_size=3))
@example(AWKWARD)
@settings(max_examples=30)
def test_a_shell_gives_docker_every_text_as_it_is(values: list[str]) -> None:
    server = plan(environment={f"V{n}": value for n, value in enumerate(values)}, served_model_name=values[0])
    command = run_by_a_shell(rendered(server, "docker"), {"HF_HOME": "/hub"})
    assert command == [part.replace(HUB_CACHE, "/hub/hub") for part in json.loads(rendered(server, "json"))["docker"]]
    assert after(command, "--served-model-name")[0] == values[0]
    assert {f"V{n}={value}" for n, value in enumerate(values)} <= set(command)


# --- compose


def test_the_compose_service_carries_the_config_file_itself() -> None:
    for server in (plan(), TENSORRT_LLM, LOCAL):
        service, content = service_of(server)
        (config,) = service["configs"]
        assert undoubled(content) == config_text(server, 8000)
        assert service["command"] == container_of(server, Path("x"), 1, {}).arguments
        assert after(service["command"], "--config") == [config["target"]]
        assert service["image"] == IMAGE.pinned


def test_the_compose_service_is_the_qualified_container() -> None:
    service, _ = service_of(plan())
    assert (service["shm_size"], service["mem_limit"], service["platform"]) == ("32g", "1536m", "linux/amd64")
    assert (service["cap_drop"], service["security_opt"]) == (["ALL"], ["no-new-privileges"])
    assert service["ports"] == ["8000:8000"]
    assert service["deploy"]["resources"]["reservations"]["devices"] == [{"count": 2, "capabilities": ["gpu"]}]
    (cache,) = service["volumes"]
    assert (cache["source"], cache["target"]) == (HUB_CACHE, "/root/.cache/huggingface/hub")
    assert service["healthcheck"]["start_period"] == "1235s"
    assert "restart" not in service


def test_the_compose_services_health_is_asked_with_valid_python() -> None:
    service, _ = service_of(plan())
    kind, *command = service["healthcheck"]["test"]
    assert (kind, *command[:2]) == ("CMD", "python3", "-c")
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1, "there is no server"
    assert "URLError" in done.stderr or "HTTPError" in done.stderr


def test_local_weights_of_a_compose_service_must_be_there() -> None:
    service, _ = service_of(LOCAL)
    assert [(undoubled(volume["source"]), volume["target"]) for volume in service["volumes"]] == [
        ("/models/tiny: $1, a", "/vllm-qualify/model"),
        ("/models/draft", "/vllm-qualify/draft"),
    ]
    assert all(volume["read_only"] and volume["bind"] == {"create_host_path": False} for volume in service["volumes"])


def test_what_was_qualified_without_gpus_or_limit_is_given_none() -> None:
    server = plan(gpus=[], memory_limit_gib=None)
    service, _ = service_of(server)
    assert not {"deploy", "mem_limit"} & set(service)
    assert not {"--gpus", "--memory"} & set(run_by_a_shell(rendered(server, "docker"), {"HF_HOME": "/hub"}))
    assert pod_of(server)[1]["resources"] == {"limits": {}}


# --- kubernetes


def test_the_manifest_carries_the_config_file_itself() -> None:
    for server in (plan(), TENSORRT_LLM, LOCAL):
        config, (pod, container) = objects_of(server)["ConfigMap"], pod_of(server)
        (mount,) = (mount for mount in container["volumeMounts"] if mount["name"] == "config")
        (volume,) = (volume for volume in pod["volumes"] if volume["name"] == "config")
        assert volume["configMap"]["name"] == config["metadata"]["name"]
        assert config["data"][mount["subPath"]] == config_text(server, 8000)
        assert after(container["args"], "--config") == [mount["mountPath"]]
        assert container["args"] == container_of(server, Path("x"), 1, {}).arguments
        assert container["image"] == IMAGE.pinned


def test_the_manifests_parts_find_each_other() -> None:
    objects = objects_of(plan())
    deployment, service = objects["Deployment"]["spec"], objects["Service"]["spec"]
    labels = deployment["template"]["metadata"]["labels"]
    assert labels == deployment["selector"]["matchLabels"] == service["selector"] == {"app.kubernetes.io/name": "tiny-bf16"}
    pod, container = pod_of(plan())
    (port,), (served,) = container["ports"], service["ports"]
    assert (served["targetPort"], served["port"], port["containerPort"]) == (port["name"], 8000, 8000)
    assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in pod["volumes"]}
    for described in (*objects.values(), deployment["template"]):
        assert described["metadata"]["annotations"] == {f"vllm-qualify/{key}": value for key, value in ANNOTATIONS.items()}


def test_the_pod_is_the_qualified_container() -> None:
    pod, container = pod_of(plan())
    assert container["resources"]["limits"] == {"nvidia.com/gpu": 2, "memory": "1536Mi"}
    assert pod["nodeSelector"] == {"kubernetes.io/os": "linux", "kubernetes.io/arch": "amd64"}
    assert {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": "32Gi"}} in pod["volumes"]
    assert container["securityContext"]["capabilities"]["drop"] == ["ALL"]
    assert {"name": "hub-cache", "emptyDir": {}} in pod["volumes"]
    assert {"name": "VLLM_LOGGING_LEVEL", "value": "DEBUG"} in container["env"]
    (token,) = (entry for entry in container["env"] if entry["name"] == "HF_TOKEN")
    assert token["valueFrom"]["secretKeyRef"] == {"name": "hf-token", "key": "token", "optional": True}
    startup = container["startupProbe"]
    assert startup["failureThreshold"] * startup["periodSeconds"] == 1240, "no sooner than the qualification's 1234.5 s"
    assert startup["httpGet"] == container["readinessProbe"]["httpGet"] == {"path": "/health", "port": "http"}
    assert pod["enableServiceLinks"] is False


def test_local_weights_of_a_pod_are_the_nodes() -> None:
    pod, container = pod_of(LOCAL)
    where = {mount["name"]: mount for mount in container["volumeMounts"]}
    for name, path in (("model", "/models/tiny: $1, a"), ("draft", "/models/draft")):
        assert {"name": name, "hostPath": {"path": path, "type": "Directory"}} in pod["volumes"]
        assert (where[name]["mountPath"], where[name]["readOnly"]) == (f"/vllm-qualify/{name}", True)
    assert "hub-cache" not in where


@pytest.mark.thorough
@given(st.lists(texts, min_size=1, max_size=3), texts)
@example(AWKWARD, "a\n: $(id)")
def test_every_text_stays_data_in_yaml(values: list[str], expires: str) -> None:
    environment = {f"V{n}": value for n, value in enumerate(values)}
    server = plan(kind="tensorrt-llm", environment=environment, served_model_name=values[0], arguments={"a": {"b": values[-1]}})
    service, content = service_of(server)
    assert {name: undoubled(service["environment"][name]) for name in environment} == environment
    assert list(map(undoubled, service["command"])) == container_of(server, Path("x"), 1, {}).arguments
    assert yaml.safe_load(undoubled(content))["a"] == {"b": values[-1]}
    config, deployment, _ = yaml.safe_load_all(deployable(server, "kubernetes", "tiny", {"expires": expires}))
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    read = {entry["name"]: undoubled(entry["value"]) for entry in container["env"] if "value" in entry}
    assert read.items() >= environment.items()
    assert list(map(undoubled, container["args"])) == container_of(server, Path("x"), 1, {}).arguments
    assert config["data"]["server.yaml"] == config_text(server, 8000)
    assert deployment["metadata"]["annotations"] == {"vllm-qualify/expires": expires}


def test_yaml_is_written_for_people() -> None:
    text = rendered(plan(), "kubernetes") + rendered(plan(), "compose")
    assert not re.search(r"[&*]id\d", text)
    assert "  server.yaml: |\n    host: 0.0.0.0\n" in text


@pytest.mark.parametrize("value", ["1e3", "0o7", "-.5", "+1", "y", "N", "12e34", "0x1F", "yes", "null", ""])
def test_text_that_other_readers_of_yaml_take_for_something_else_is_quoted(value: str) -> None:
    server = plan(environment={"GIVEN": value})
    assert f"      GIVEN: '{value}'\n" in rendered(server, "compose")
    assert f"- name: GIVEN\n          value: '{value}'\n" in rendered(server, "kubernetes")


# --- json


def test_json_tells_all_to_a_machine() -> None:
    document = json.loads(rendered(plan(), "json"))
    assert ServerPlan.model_validate(document["plan"]) == plan()
    assert document["image"] == IMAGE.pinned
    assert document["config"] == config_text(plan(), 8000)
    assert document["annotations"] == ANNOTATIONS
    expanded = [part.replace(HUB_CACHE, "/hub/hub") for part in document["docker"]]
    assert expanded == run_by_a_shell(rendered(plan(), "docker"), {"HF_HOME": "/hub"})


def test_json_has_no_docker_line_where_there_is_none() -> None:
    assert json.loads(rendered(TENSORRT_LLM, "json"))["docker"] is None
    of_a_process = json.loads(rendered(plan(engine=PROCESS), "json"))
    assert (of_a_process["docker"], of_a_process["image"]) == (None, None)


# --- refused


@pytest.mark.parametrize("form", ["docker", "compose", "kubernetes"])
def test_a_process_is_no_container_and_a_tag_is_not_what_was_qualified(form: Format) -> None:
    with pytest.raises(CallerError, match="ran as a process") as raised:
        rendered(plan(engine=PROCESS), form)
    assert "config or json" in raised.value.remedy
    assert raised.value.place == f"--format {form}"
    with pytest.raises(CallerError, match=r"v0\.32\.0 has no digest"):
        rendered(plan(engine=IMAGE.model_copy(update={"digest": None})), form)


def test_options_that_need_a_file_have_no_docker_line() -> None:
    with pytest.raises(CallerError, match="TensorRT-LLM does not take all its options") as raised:
        rendered(TENSORRT_LLM, "docker")
    assert "compose or kubernetes" in raised.value.remedy


@pytest.mark.parametrize("name", ["", "a", "Tiny", "1a", "a-", "a_b", "a.b", "a\nb", "ab\n", "a'b", "$(id)", "a" * 64])
def test_a_name_that_not_all_take_is_refused_by_every_format(name: str) -> None:
    for form in get_args(Format):
        with pytest.raises(CallerError, match="cannot name a deployment"):
            deployable(plan(), form, name, ANNOTATIONS)


# --- vLLM's own parser

# Servers' options by file and by flags, to both commands that images of vLLM begin with.
PARSE = """
import json, sys
from vllm.entrypoints.cli.serve import ServeSubcommand
from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.utils.argparse_utils import FlexibleArgumentParser

command = FlexibleArgumentParser()
ServeSubcommand().subparser_init(command.add_subparsers(dest="subparser"))
module = make_arg_parser(FlexibleArgumentParser())

def shown(arguments):
    values = vars(arguments)
    model_tag = values.pop("model_tag", None)
    values["model"] = model_tag or values["model"]
    return {name: repr(value) for name, value in values.items()}

def both(arguments):
    return [shown(command.parse_args(["serve", *arguments])), shown(module.parse_args(arguments))]

print(json.dumps([[both(by_file), both(by_flags)] for by_file, by_flags in json.load(open(sys.argv[1]))]))
"""


CASES: list[dict[str, Any]] = [
    {"seed": 7, "gpu-memory-utilization": 1e-05, "max-model-len": "32k"},
    {"enable-prefix-caching": True, "async-scheduling": False, "enable-log-requests": False},
    {"no-enable-prefix-caching": True, "disable-log-stats": True, "no-async-scheduling": False},
    {"chat-template": '{{ it\'s "a" $HOME\n\tb }}', "tool-call-parser": "on"},
    {
        "speculative-config": {"model": "/models/draft", "num_speculative_tokens": 2, "x": {"y": [1, False]}},
        "compilation-config": {"mode": 3, "pass_config": {"fuse_norm_quant": False}, "cudagraph_capture_sizes": [1, 2]},
        "hf-overrides": {"rope_scaling": {"factor": 2.5, "type": "it's"}, "text": "ü $(id)"},
    },
    {"allowed-origins": '["https://a.b", "*"]', "middleware": ["a.b"], "lora-modules": ["a=/b c"]},
    {"lora-modules": ['{"name": "a", "path": "/b"}', "c=/d"], "cudagraph-capture-sizes": [1, 2, 4]},
    {"cudagraph-capture-sizes": [], "override-generation-config": {}},
]


@pytest.mark.engine
def test_vllm_reads_the_flags_as_it_reads_the_file(engine: EngineEnvironment, tmp_path: Path) -> None:
    weights = {"model": "/models/a b", "revision": None}
    servers = [plan(), *(plan(arguments=arguments, served_model_name="it's $1", **weights) for arguments in CASES)]
    asked = []
    for number, server in enumerate(servers):
        file = tmp_path / f"{number}.yaml"
        file.write_text(rendered(server, "config"))
        line = run_by_a_shell(rendered(server, "docker"), {"HF_HOME": "/hub"})
        asked.append((["--config", str(file)], line[line.index(IMAGE.pinned) + 1 :]))
    (tmp_path / "asked.json").write_text(json.dumps(asked))
    done = run_script(engine, PARSE, tmp_path / "asked.json")
    assert done.returncode == 0, done.stderr[-3000:]
    answers = json.loads(done.stdout.splitlines()[-1])
    for (by_file, by_flags), server in zip(answers, servers, strict=True):
        assert by_file == by_flags, server.arguments
    (as_command, as_module), _ = answers[1]
    assert as_command.items() >= {"seed": "7", "max_model_len": "32000", "gpu_memory_utilization": "1e-05"}.items()
    assert as_module.items() >= {"model": "'/vllm-qualify/model'", "served_model_name": repr(["it's $1"])}.items()
    assert answers[2][1][0].items() >= {"enable_prefix_caching": "True", "async_scheduling": "False"}.items()
