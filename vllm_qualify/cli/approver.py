"""The commands of the approver: the service that alone signs for a fleet, and the keys of the people who decide there."""

import os
from pathlib import Path
from typing import Annotated

import typer

from vllm_qualify.cli.words import EXIT_CODES

approver_app = typer.Typer(help="The service in which people decide for a fleet, and their keys.", no_args_is_help=True)

FileOption = Annotated[
    Path | None, typer.Option("--file", metavar="FILE", help="The approvers; by default VLLM_QUALIFY_APPROVERS_FILE.")
]


@approver_app.command("key", epilog=EXIT_CODES)
def approver_key(
    name: Annotated[str, typer.Argument(metavar="NAME", help="The person, as approvals will name them.")],
    file: FileOption = None,
) -> None:
    """Give a person a new key to log in with, in place of an older one. It is shown once."""
    from vllm_qualify.approver.people import add_person

    path = _approvers_file(file)
    key = add_person(path, name)
    typer.echo(f"{name} may decide; {path} has the hash of this key, which is shown only now:", err=True)
    typer.echo(key)


@approver_app.command("serve", epilog=EXIT_CODES)
def approver_serve(
    store: Annotated[
        str | None, typer.Option(help="s3://bucket/prefix or file:///folder; by default VLLM_QUALIFY_STORE.")
    ] = None,
    file: FileOption = None,
    recipe: Annotated[
        list[str] | None,
        typer.Option(metavar="RECIPE", help="A recipe that may approve automatically, also repeated; by default none."),
    ] = None,
    image: Annotated[
        list[str] | None,
        typer.Option(
            metavar="REPOSITORY",
            help="A repository whose images may be approved automatically, also repeated; by default vllm/vllm-openai.",
        ),
    ] = None,
    engine: Annotated[
        list[str] | None,
        typer.Option(
            metavar="DIGEST",
            help="Packages of a host that may be approved automatically, by the engine's digest in reports, also repeated; by"
            " default only images are.",
        ),
    ] = None,
    inherit: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help="A variable of a host's own environment that its servers may have had, also repeated; by default none.",
        ),
    ] = None,
    host: Annotated[
        str, typer.Option(help="The address to listen on. A proxy with TLS belongs before any other.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=1, max=65535)] = 8304,
) -> None:
    """Let people decide about a store's reports. What its recipes approve themselves is approved.

    It signs with VLLM_QUALIFY_PRIVATE_KEY (PEM) or VLLM_QUALIFY_PRIVATE_KEY_FILE. No other part of a fleet needs that key. The
    keys of others who approve baselines are in VLLM_QUALIFY_PUBLIC_KEY or VLLM_QUALIFY_PUBLIC_KEY_FILE.
    """
    import logging

    import uvicorn

    from vllm_qualify.approval.index import read_index
    from vllm_qualify.approval.signing import PRIVATE_KEY, keys_of_others, private_key
    from vllm_qualify.approver.decisions import IMAGES, Desk
    from vllm_qualify.approver.people import read_people
    from vllm_qualify.approver.service import make_app
    from vllm_qualify.publish.stores import open_store
    from vllm_qualify.recipe.loading import load_recipe
    from vllm_qualify.runs.home import default_store_url

    path, key, opened = _approvers_file(file), private_key(), open_store(store or default_store_url())
    # Nothing that this process starts or imports later needs it.
    os.environ.pop(PRIVATE_KEY, None)
    recipes = {loaded.recipe.name: loaded for loaded in map(load_recipe, recipe or [])}
    desk = Desk(opened, key, recipes, image or IMAGES, engine or [], inherit or [], keys_of_others())
    # A problem of the approvers or the store ends the start, before anybody tries to decide.
    read_people(path)
    read_index(opened)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    uvicorn.run(make_app(desk, path), host=host, port=port, log_config=None)


def _approvers_file(given: Path | None) -> Path:
    from vllm_qualify.approver.people import APPROVERS_FILE
    from vllm_qualify.errors import CallerError

    named = given or os.environ.get(APPROVERS_FILE)
    if not named:
        raise CallerError("the file of approvers is not named", f"give --file, or set {APPROVERS_FILE}", "--file")
    return Path(named)
