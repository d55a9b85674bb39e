"""The commands about a store: `store upgrade` and `prune`."""

from typing import Annotated

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
    # A directory that is not there is a typing error: `check` would make it.
    opened.keys("")
    opened.check()
    upgrade(opened, typer.echo)


def prune(
    keep: Annotated[int, typer.Option(min=1, help="How many of each cell's newest reports are kept.")],
    older_than_days: Annotated[int, typer.Option(min=1, help="Only older reports are removed.")],
    store: StoreOption = None,
    delete: Annotated[
        bool, typer.Option("--delete", help="Remove the reports. Without this option they are only listed.")
    ] = False,
) -> None:
    """Remove old reports from a store, and the evidence that only they use.

    Reports with a decision, baselines, and the evidence of both are kept. Nothing can be published meanwhile.
    If the command was stopped, run it again.
    """
    from vllm_qualify.publish.stores import open_store
    from vllm_qualify.runs import prune as pruning
    from vllm_qualify.runs.home import default_store_url

    opened = open_store(store or default_store_url())
    now, policy = opened.now(), pruning.Policy(keep=keep, older_than_days=older_than_days)
    if delete:
        typer.echo(f"removed: {pruning.prune_store(opened, policy, now, typer.echo).summary}")
        return
    planned = pruning.plan_pruning(opened, policy, now)
    for cell, run_id in planned.runs:
        typer.echo(f"{cell}: run {run_id}")
    typer.echo(f"would go: {planned.summary}; --delete removes it")
