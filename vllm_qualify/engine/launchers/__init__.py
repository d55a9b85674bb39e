"""Launchers: how a server and its tools are run. One file for each, and `registry` lists them. Here are their names only."""

from typing import Literal

ImageLauncherName = Literal["docker"]
"""Those that run an image."""

LauncherName = Literal["process", "docker"]
