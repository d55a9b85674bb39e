"""Launchers: how a server and its tools are run. Each has a file, and `registry` lists them. This file has only their names."""

from typing import Literal

ImageLauncherName = Literal["docker"]
"""The launchers that run an image."""

LauncherName = Literal["process", "docker"]
