"""The commands about a store: `store upgrade`."""

import typer

from vllm_qualify.cli.approval import StoreOption
from vllm_qualify.cli.words import EXIT_CODES

store_app = typer.Typer(help="Look after a store.", no_args_is_help=True)


@store_app.callback()
def _subject() -> None:
    """Named so that its one command keeps its name."""


@store_app.command("upgrade", epilog=EXIT_CODES)
def store_upgrade(store: StoreOption = None) -> None:
    """Bring a store of an earlier version to today's layout. It can be stopped and called again; reports and approvals stay."""
    from vllm_qualify.approval.upgrade import upgrade
    from vllm_qualify.publish.stores import open_store
    from vllm_qualify.runs.home import default_store_url

    opened = open_store(store or default_store_url())
    opened.check()
    upgrade(opened, typer.echo)
