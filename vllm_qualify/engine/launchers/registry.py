"""The launchers by name, and the launcher of an engine."""

from collections.abc import Mapping

from vllm_qualify.engine.launchers import LauncherName
from vllm_qualify.engine.launchers.base import Launcher
from vllm_qualify.engine.launchers.docker import DockerLauncher
from vllm_qualify.engine.launchers.process import ProcessLauncher
from vllm_qualify.engine.server import Client, Engine

LAUNCHERS: Mapping[LauncherName, Launcher] = {"process": ProcessLauncher(), "docker": DockerLauncher()}


def launcher_of(what: Engine | Client) -> Launcher:
    """The launcher that runs this engine or client."""
    return LAUNCHERS[what.launcher]
