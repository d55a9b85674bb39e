"""Where this machine keeps runs, engines' answers and the default store."""

import os
from pathlib import Path

from vllm_qualify.errors import writing


def home() -> Path:
    """VLLM_QUALIFY_HOME, else ~/.vllm-qualify."""
    return Path(os.environ.get("VLLM_QUALIFY_HOME") or "~/.vllm-qualify").expanduser().absolute()


def make_home() -> Path:
    """The folder `home`, created if it is missing. Raises HostError if that fails."""
    folder = home()
    with writing("check"):
        folder.mkdir(parents=True, exist_ok=True)
    return folder


def runs_folder() -> Path:
    """The folder of all runs. Each run has a folder in it, named by its id."""
    return home() / "runs"


def engine_cache() -> Path:
    """The folder of the engines' answers: one file for each engine and question."""
    return home() / "engines"


def default_store_url() -> str:
    """VLLM_QUALIFY_STORE, else a folder in `home`."""
    return os.environ.get("VLLM_QUALIFY_STORE") or f"file://{home() / 'store'}"


def make_default_store() -> None:
    """Create the default store's folder in `home`, if VLLM_QUALIFY_STORE names no other store. Raises HostError.

    Nobody types the name of this folder, so a missing folder is an empty store, and not a mistake.
    """
    if not os.environ.get("VLLM_QUALIFY_STORE"):
        with writing("check"):
            (home() / "store").mkdir(parents=True, exist_ok=True)
