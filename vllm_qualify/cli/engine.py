"""The commands about engine environments: `engine install`, `engine list`, `engine remove`."""

from pathlib import Path
from typing import Annotated

import typer

from vllm_qualify.cli.words import EXIT_CODES, tell
from vllm_qualify.errors import CallerError, HostError

engine_app = typer.Typer(help="Install vLLM into an environment of its own.", no_args_is_help=True)


@engine_app.command("install", epilog=EXIT_CODES)
def engine_install(
    cpu: Annotated[bool, typer.Option("--cpu", help="vLLM's build for the CPU.")] = False,
    cuda: Annotated[bool, typer.Option("--cuda", help="vLLM's build for NVIDIA GPUs.")] = False,
    vllm: Annotated[
        str | None, typer.Option(metavar="VERSION", help="By default the version that vllm-qualify has a lock of.")
    ] = None,
    to: Annotated[Path | None, typer.Option(metavar="FOLDER", help="By default a folder that every run finds.")] = None,
) -> None:
    """Build an environment with vLLM. Without --cpu or --cuda, this machine's driver decides which build it is.

    Every file of the default version is locked by its hash. A build that was broken off goes on with what it had fetched.
    """
    from vllm_qualify.engine.environment import OVERRIDE, EngineEnvironment, find_engine
    from vllm_qualify.engine.installing import default_build, install_engine

    if cpu and cuda:
        raise CallerError("an environment has one build of vLLM", "leave one of the two out", "--cuda")
    build = "cpu" if cpu else "cuda" if cuda else default_build()
    folder = install_engine(build, vllm, to.expanduser().absolute() if to else None, tell)
    installed = EngineEnvironment(python=folder / "bin" / "python")
    typer.echo(f"vLLM {installed.identity().version} is in {folder}")
    try:
        is_used = find_engine().python == installed.python
    except HostError:
        is_used = False
    typer.echo("runs use it" if is_used else f"to use it: export {OVERRIDE}={folder}")
    if build == "cpu":
        _warn_of_libnuma()


def _warn_of_libnuma() -> None:
    from vllm_qualify.doctor import find_libnuma

    try:
        find_libnuma()
    except HostError as error:
        tell(f"libnuma1 is not installed: {error.problem}; {error.remedy}")


@engine_app.command("list", epilog=EXIT_CODES)
def engine_list(json: Annotated[bool, typer.Option("--json", help="The environments as JSON.")] = False) -> None:
    """List the installed environments.

    The newest version comes first. Each has its size, and one is what runs use.
    """
    from json import dumps

    from vllm_qualify.engine.environment import find_engine
    from vllm_qualify.engine.installing import list_installed

    try:
        used = find_engine().python.parent.parent
    except HostError:
        used = None
    found = list_installed()
    if json:
        keys = ("name", "version", "build", "folder", "is_finished", "is_used", "size_gb")
        rows = [(e.name, e.version, e.build, str(e.folder), e.is_finished, e.folder == used, e.size_gb()) for e in found]
        typer.echo(dumps([dict(zip(keys, row, strict=True)) for row in rows], indent=2))
        return
    for each in found:
        state = "runs use it" if each.folder == used else "" if each.is_finished else "not finished: install it again"
        typer.echo(f"{each.name:<14} {each.size_gb():5.1f} GB  {each.folder}  {state}".rstrip())
    if used and used not in [each.folder for each in found]:
        typer.echo(f"runs use {used}")
    if not found:
        tell("no engine is installed; try: vllm-qualify engine install")


@engine_app.command("remove", epilog=EXIT_CODES)
def engine_remove(name: Annotated[str, typer.Argument(metavar="NAME", help="As `engine list` shows it: 0.32.0-cpu.")]) -> None:
    """Remove an installed environment."""
    from vllm_qualify.engine.installing import remove_engine

    typer.echo(f"removed {remove_engine(name)}")
