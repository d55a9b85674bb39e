"""The qualified server in the formats that people deploy.

Each format names the image by its digest. It holds the text of the config file if it can carry a file.
"""

import hashlib
import json
import math
import re
import shlex
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import Any

import yaml
from pydantic import JsonValue

from vllm_qualify.approval.layout import Format
from vllm_qualify.engine import server
from vllm_qualify.engine.containers.plan import CAPABILITIES, NO_NEW_PRIVILEGES, SERVED_PORT, Bind, ContainerPlan, command_line
from vllm_qualify.engine.image import EngineImage
from vllm_qualify.engine.server import CONFIG_INSIDE, HF_HOME_INSIDE, OFFLINE, PASSED, ServerPlan
from vllm_qualify.errors import CallerError
from vllm_qualify.recipe.serving import VLLM

Annotations = Mapping[str, str]

# Docker, Compose and Kubernetes all accept such a name.
MOST_NAME_LETTERS = 63
NAME = re.compile(rf"[a-z][a-z0-9-]{{0,{MOST_NAME_LETTERS - 2}}}[a-z0-9]")
CONFIG_FILE = PurePosixPath(CONFIG_INSIDE).name
PUBLISHED = f"{SERVED_PORT}:{SERVED_PORT}"
# The host's cache, as in a qualification. A shell and Compose both expand it.
# Not all of HF_HOME: the token of a login is in it.
HUB_CACHE, HUB_INSIDE = "${HF_HOME:-${HOME}/.cache/huggingface}/hub", f"{HF_HOME_INSIDE}/hub"
HUB_VOLUME = f"{HUB_CACHE}:{HUB_INSIDE}"
HEALTH = "/health"
# An engine's image has Python, but perhaps no curl.
ASK_HEALTH = f"import urllib.request; urllib.request.urlopen('http://127.0.0.1:{SERVED_PORT}{HEALTH}')"
# Compose and Kubernetes read a bare 1e3, 0o7, -.5 or y as a number or as true.
ELSEWHERE_NO_TEXT = re.compile(r"[-+.\d]|.?$")
PROBE_EVERY_S = 10
# Kubernetes allows this by default for a whole rollout. Here it is the time for the pull, before the start.
PULL_WITHIN_S = 600


def deployable(plan: ServerPlan, format: Format, name: str, annotations: Annotations) -> str:  # noqa: A002  (the option's name)
    """The server of `plan`, with port 8000, in one format:

    - `config`: the config file as the server read it. A comment before it has the annotations and the command that reads it.
    - `docker`: a `docker run` line for a POSIX shell. It needs no other file: it has the options that vLLM itself makes from
      the config file. The annotations are labels of the container.
    - `compose`: a Compose file (2.23.1 or later) that contains the config file.
    - `kubernetes`: ConfigMap, Deployment and Service. Each pod downloads weights of the hub again. Local weights must be at
      their path on the node. A Secret `hf-token` may hold the hub's token as `token`.
    - `json`: `name`, `annotations`, `image` by digest, `plan`, `config` (the file's text) and `docker`, the arguments of
      `docker run`. `image` is null if there is none. `docker` is null if the format `docker` is refused. A shell must expand
      one argument, the volume of the hub cache.

    The formats give the number of GPUs, not their indices, which belong to the machine that qualified. Variables that the
    qualification took from its environment are taken from the deployer's environment. `name` names the container, the service
    and the objects. Keys of `annotations` (cell, run, expiry, …) are valid Kubernetes names. Raises CallerError if the name is
    not valid, or the qualified server cannot be written in this format.
    """
    if not NAME.fullmatch(name):
        remedy = "use 2 to 63 lower-case letters, digits and '-', a letter first and no '-' last"
        raise CallerError(f"{name!r} cannot name a deployment", remedy, "name")
    return _FORMS[format](plan, name, annotations)


def deployment_name(cell: str) -> str:
    """A name for a cell's server that is valid in every format, like `vllm-reference-bf16-cpu-balanced`."""
    name = f"vllm-{re.sub('[^a-z0-9]+', '-', cell)}"
    if len(name) <= MOST_NAME_LETTERS:
        return name
    # Two long cells must not have one name.
    mark = hashlib.sha256(cell.encode()).hexdigest()[:8]
    return f"{name[: MOST_NAME_LETTERS - len(mark) - 1].rstrip('-')}-{mark}"


def _format_config(plan: ServerPlan, _name: str, annotations: Annotations) -> str:
    arguments = plan.engine_kind.arguments(plan.served_model(SERVED_PORT), "FILE")
    if isinstance(plan.engine, EngineImage):
        reader = [plan.engine.pinned, *arguments]
    else:
        variables = [f"{name}={value}" for name, value in plan.variables.items()]
        reader = [*(("env", *variables) if variables else ()), "vllm", "serve", *arguments]
    return _comment_line(annotations, shlex.join(reader)) + _config_file(plan)


def _config_file(plan: ServerPlan) -> str:
    return server.config_text(plan, SERVED_PORT)


def _comment_line(annotations: Annotations, *more: str) -> str:
    """One comment line. Line breaks are escaped: the text after one would not be a comment."""
    text = "; ".join([*(f"{name} {value}" for name, value in annotations.items()), *more])
    printable = (sign if sign.isprintable() else sign.encode("unicode_escape").decode() for sign in text)
    return f"# {''.join(printable)}\n"


def _format_docker(plan: ServerPlan, name: str, annotations: Annotations) -> str:
    lines: list[list[str]] = [[]]
    for part in _docker_run(plan, name, annotations):
        if part.startswith("--") or part == _engine_image(plan, "docker").pinned:
            lines.append([])
        lines[-1].append(f'"{part}"' if part == HUB_VOLUME else shlex.quote(part))
    return " \\\n  ".join(map(" ".join, lines)) + "\n"


def _docker_run(plan: ServerPlan, name: str, annotations: Annotations) -> list[str]:
    labels = {"labels": _qualified_names(annotations)}
    planned = _qualified_container(plan, name, "docker").model_copy(update=labels)
    if plan.kind != VLLM:
        problem = f"{plan.engine_kind.title} does not take all its options on a command line"
        raise CallerError(problem, "take compose or kubernetes, which carry the config file", "--format docker")
    command = command_line(planned.model_copy(update={"arguments": list(_config_flags(_config_file(plan)))}))
    gpus = ["--gpus", str(len(plan.gpus))] if plan.gpus else []
    cache = [] if plan.is_local else ["--volume", HUB_VOLUME]
    after_run = command.index("--detach")
    return [*command[:after_run], *gpus, "--publish", PUBLISHED, *cache, *command[after_run:]]


def _qualified_names(annotations: Annotations) -> dict[str, str]:
    """The annotations by the names that they have on a container or an object of Kubernetes."""
    return {f"vllm-qualify/{key}": value for key, value in annotations.items()}


def _qualified_container(plan: ServerPlan, name: str, form: Format) -> ContainerPlan:
    """The qualified container without the parts of that machine: its GPUs, port, hub cache and path of the config file."""
    _engine_image(plan, form)
    planned = server.container_of(plan, Path(CONFIG_FILE), SERVED_PORT, {})
    # A deployment fetches what it serves itself, at the commits that were qualified.
    left_out = OFFLINE.keys() - plan.environment.keys()
    environment = {variable: value for variable, value in planned.environment.items() if variable not in left_out}
    passed = [variable for variable in PASSED if variable not in environment]
    own: dict[str, Any] = {"name": name, "environment": environment, "passed": passed, "binds": _weight_binds(plan)}
    return planned.model_copy(update=own | {"labels": {}, "gpus": [], "port": None})


def _engine_image(plan: ServerPlan, form: Format) -> EngineImage:
    """The engine's image. Raises CallerError if the engine is not an image with a digest."""
    place = f"--format {form}"
    if not isinstance(plan.engine, EngineImage):
        remedy = "take config or json, or qualify an image"
        raise CallerError("what was qualified ran as a process: there is no image to deploy", remedy, place)
    if plan.engine.digest is None:
        raise CallerError(f"{plan.engine.reference} has no digest", "take the plan of a run, which has resolved it", place)
    return plan.engine


def _weight_binds(plan: ServerPlan) -> list[Bind]:
    return [bind for bind in server.model_binds(plan) if bind.target in (server.MODEL_INSIDE, server.DRAFT_INSIDE)]


def _config_flags(config: str) -> Iterator[str]:
    """The command-line options that vLLM makes from a config file. `config_text` writes no mapping and no `false`."""
    for option, value in yaml.safe_load(config).items():
        if value == []:
            continue
        yield f"--{option}"
        if value is not True:
            yield from map(str, value if isinstance(value, list) else [value])


def _format_compose(plan: ServerPlan, name: str, annotations: Annotations) -> str:
    planned = _qualified_container(plan, name, "compose")
    service: dict[str, Any] = {
        "image": planned.image,
        "platform": planned.platform,
        "command": _double_dollars(planned.arguments),
        "environment": _double_dollars(planned.environment) | dict.fromkeys(planned.passed),
        "configs": [{"source": "server", "target": CONFIG_INSIDE}],
        "volumes": _compose_volumes(plan),
        "ports": [PUBLISHED],
        "shm_size": f"{planned.shared_memory_gib}g",
        "cap_drop": ["ALL"],
        "cap_add": CAPABILITIES,
        "security_opt": [NO_NEW_PRIVILEGES],
        "healthcheck": {
            "test": ["CMD", "python3", "-c", ASK_HEALTH],
            "interval": f"{PROBE_EVERY_S}s",
            "start_period": f"{math.ceil(plan.startup_timeout_s)}s",
        },
    }
    if planned.memory_limit_mib:
        service["mem_limit"] = f"{planned.memory_limit_mib}m"
    if plan.gpus:
        devices = [{"count": len(plan.gpus), "capabilities": ["gpu"]}]
        service["deploy"] = {"resources": {"reservations": {"devices": devices}}}
    file = {"services": {name: service}, "configs": {"server": {"content": _double_dollars(_config_file(plan))}}}
    return _comment_line(annotations) + _dump_yaml(file)


def _compose_volumes(plan: ServerPlan) -> list[dict[str, Any]]:
    """The volumes. Missing weights are an error; a missing cache folder is created."""
    volumes: list[dict[str, Any]] = []
    if not plan.is_local:
        volumes.append({"type": "bind", "source": HUB_CACHE, "target": HUB_INSIDE, "bind": {"create_host_path": True}})
    for bind in _weight_binds(plan):
        named = {"type": "bind", "source": _double_dollars(str(bind.source)), "target": bind.target}
        volumes.append(named | {"read_only": True, "bind": {"create_host_path": False}})
    return volumes


def _double_dollars(value: Any) -> Any:
    """A text, or a list or mapping of texts, with every `$` doubled: a single one would start a variable in both formats."""
    if isinstance(value, dict):
        return {key: _double_dollars(inner) for key, inner in value.items()}
    return list(map(_double_dollars, value)) if isinstance(value, list) else value.replace("$", "$$")


def _format_kubernetes(plan: ServerPlan, name: str, annotations: Annotations) -> str:
    planned = _qualified_container(plan, name, "kubernetes")
    labels = {"app.kubernetes.io/name": name}
    described = {"labels": labels, "annotations": _qualified_names(annotations)}
    about = {"name": name, **described}
    config = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": about, "data": {CONFIG_FILE: _config_file(plan)}}
    deployment = {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": about,
        "spec": {
            "replicas": 1,
            "progressDeadlineSeconds": PULL_WITHIN_S + math.ceil(plan.startup_timeout_s),
            "selector": {"matchLabels": labels},
            "template": {"metadata": described, "spec": _pod_spec(plan, planned)},
        },
    }
    port = {"name": "http", "port": SERVED_PORT, "targetPort": "http"}
    service = {"apiVersion": "v1", "kind": "Service", "metadata": about, "spec": {"selector": labels, "ports": [port]}}
    return _dump_yaml(config, deployment, service)


def _pod_spec(plan: ServerPlan, planned: ContainerPlan) -> dict[str, Any]:
    os, architecture = planned.platform.split("/")[:2]
    mounts = list(_pod_mounts(plan, str(planned.name)))
    token = {"secretKeyRef": {"name": "hf-token", "key": "token", "optional": True}}
    variables = [{"name": name, "value": _double_dollars(value)} for name, value in planned.environment.items()]
    limits: dict[str, JsonValue] = {"nvidia.com/gpu": len(plan.gpus)} if plan.gpus else {}
    if planned.memory_limit_mib:
        limits["memory"] = f"{planned.memory_limit_mib}Mi"
    probe = {"httpGet": {"path": HEALTH, "port": "http"}, "periodSeconds": PROBE_EVERY_S}
    return {
        # For a service named vllm, these links would set VLLM_PORT to an address.
        "enableServiceLinks": False,
        "nodeSelector": {"kubernetes.io/os": os, "kubernetes.io/arch": architecture},
        "containers": [
            {
                "name": planned.name,
                "image": planned.image,
                "args": _double_dollars(planned.arguments),
                "env": [*variables, {"name": "HF_TOKEN", "valueFrom": token}],
                "ports": [{"name": "http", "containerPort": SERVED_PORT}],
                "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"], "add": CAPABILITIES}},
                "resources": {"limits": limits},
                "startupProbe": probe | {"failureThreshold": math.ceil(plan.startup_timeout_s / PROBE_EVERY_S)},
                "readinessProbe": probe,
                "volumeMounts": [mount for mount, _ in mounts],
            }
        ],
        "volumes": [volume for _, volume in mounts],
    }


def _pod_mounts(plan: ServerPlan, config_map: str) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """Each mount of the container with its volume in the pod."""

    def mounted(name: str, path: str, source: dict[str, Any], **more: object) -> tuple[dict[str, Any], dict[str, Any]]:
        return {"name": name, "mountPath": path, **more}, {"name": name, **source}

    yield mounted("config", CONFIG_INSIDE, {"configMap": {"name": config_map}}, subPath=CONFIG_FILE, readOnly=True)
    shared = {"medium": "Memory", "sizeLimit": f"{plan.shared_memory_gib}Gi"}
    yield mounted("shm", "/dev/shm", {"emptyDir": shared})  # noqa: S108  (every container's own)
    if not plan.is_local:
        yield mounted("hub-cache", HF_HOME_INSIDE, {"emptyDir": {}})
    for bind in _weight_binds(plan):
        on_node = {"hostPath": {"path": str(bind.source), "type": "Directory"}}
        yield mounted(PurePosixPath(bind.target).name, bind.target, on_node, readOnly=True)


def _format_json(plan: ServerPlan, name: str, annotations: Annotations) -> str:
    image = plan.engine.pinned if isinstance(plan.engine, EngineImage) else None
    content = {
        "name": name,
        "annotations": dict(annotations),
        "image": image,
        "plan": plan.model_dump(mode="json"),
        "config": _config_file(plan),
        "docker": _docker_run(plan, name, annotations) if image and plan.kind == VLLM else None,
    }
    return json.dumps(content, indent=2) + "\n"


class _Dumper(yaml.SafeDumper):
    """Keeps line breaks, writes no aliases, and quotes text that readers other than PyYAML would take for another type."""

    def ignore_aliases(self, _data: Any) -> bool:
        return True


def _text_node(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    style = "|" if "\n" in text else "'" if ELSEWHERE_NO_TEXT.match(text) else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _text_node)


def _dump_yaml(*documents: dict[str, Any]) -> str:
    return yaml.dump_all(documents, Dumper=_Dumper, sort_keys=False, width=math.inf)


_FORMS: dict[Format, Callable[[ServerPlan, str, Annotations], str]] = {
    "config": _format_config,
    "docker": _format_docker,
    "compose": _format_compose,
    "kubernetes": _format_kubernetes,
    "json": _format_json,
}
