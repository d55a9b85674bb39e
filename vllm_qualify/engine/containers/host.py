"""The Docker Engine of this machine, and its errors as this project's errors."""

import os
import platform
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from vllm_qualify.errors import HostError
from vllm_qualify.lazy import Lazy

if TYPE_CHECKING:
    import docker
    import requests
    import urllib3
else:
    docker, requests, urllib3 = Lazy("docker"), Lazy("requests"), Lazy("urllib3")

ASK_TIMEOUT_S = 180
LOCAL = ("unix://", "npipe://")
ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64"}
GONE = "docker-gone"


@contextmanager
def docker_host(place: str, timeout_s: float | None = ASK_TIMEOUT_S) -> Iterator["docker.DockerClient"]:
    """A client of the engine that DOCKER_HOST names, by default this machine's.

    Raises HostError if it does not answer, is another machine's, or refuses something that the block does not handle.
    """
    address = os.environ.get("DOCKER_HOST") or "unix:///var/run/docker.sock"
    if not address.startswith(LOCAL):
        problem = f"DOCKER_HOST is {address}, and files are mounted and ports published on this machine"
        raise HostError(problem, "run vllm-qualify on the machine of that Docker Engine", place)
    try:
        client = docker.from_env(timeout=timeout_s)
    except docker.errors.DockerException as error:
        raise gone_error(place, address) from error
    try:
        yield client
    except docker.errors.APIError as error:
        problem = f"Docker Engine refused: {engine_message(error)}"
        raise HostError(problem, "see its message", place, kind="docker-refused") from error
    # A stream that breaks off raises errors of the libraries below requests.
    except (requests.RequestException, urllib3.exceptions.HTTPError, ConnectionError) as error:
        raise gone_error(place, address) from error
    except docker.errors.DockerException as error:
        remedy = "mend Docker's own configuration (~/.docker/config.json, or where DOCKER_CONFIG says)"
        raise HostError(f"Docker's client: {error}", remedy, place, kind="docker-configuration") from error
    finally:
        client.close()


def gone_error(place: str, address: str = "") -> HostError:
    where = f" at {address}" if address else ""
    remedy = "start it (or wait until it is back), allow this user to use it, or set DOCKER_HOST"
    return HostError(f"no Docker Engine answers{where}", remedy, place, kind=GONE, retry=True)


def engine_message(error: "docker.errors.APIError") -> str:
    """The engine's own message, in one line."""
    return " ".join(str(error.explanation or error).split())


def platform_of(host: "docker.DockerClient") -> str:
    """The engine's platform: `linux/amd64` or `linux/arm64`."""
    version: dict[str, Any] = host.version()
    return f"{version['Os']}/{version['Arch']}"


def platform_here() -> str:
    """The platform of this machine, without asking an engine."""
    machine = platform.machine()
    return f"linux/{ARCHITECTURES.get(machine, machine)}"
