"""The commands `doctor`, about this machine, and `prune`, about a store."""

from typing import Annotated

import typer

from vllm_qualify.cli.words import WORLD, StoreOption, open_named_store


def doctor(
    clean: Annotated[bool, typer.Option("--clean", help="Remove the containers that killed runs left behind.")] = False,
) -> None:
    """Show what this machine has and lacks. Each line has its remedy."""
    from vllm_qualify.doctor import examine
    from vllm_qualify.engine.launchers.registry import LAUNCHERS

    for launcher in LAUNCHERS.values() if clean else []:
        for leftover in launcher.remove_leftovers():
            typer.echo(f"removed  {leftover.name}, of run {leftover.run or 'unknown'}")
    findings = examine()
    for finding in findings:
        remedy = "" if finding.ok else f"  → {finding.remedy}"
        typer.echo(f"{finding.state:<8} {finding.what:<13} {finding.detail}{remedy}")
    raise typer.Exit(0 if all(finding.ok or finding.optional for finding in findings) else WORLD)


def prune(
    keep: Annotated[int, typer.Option(min=1, help="How many of each cell's newest reports are kept.")],
    older_than_days: Annotated[int, typer.Option(min=1, max=36_500, help="Only older reports are removed.")],
    store: StoreOption = None,
    delete: Annotated[
        bool, typer.Option("--delete", help="Remove the reports. Without this option they are only listed.")
    ] = False,
) -> None:
    """Remove old reports, and the evidence that only they use.

    Reports with a decision, baselines, and the evidence of both are kept. Nothing can be published meanwhile.
    If the command was stopped, run it again.
    """
    from vllm_qualify.runs import prune as pruning

    opened = open_named_store(store)
    now, policy = opened.now(), pruning.Policy(keep=keep, older_than_days=older_than_days)
    if delete:
        typer.echo(f"removed: {pruning.prune_store(opened, policy, now, typer.echo).summary}")
        return
    planned = pruning.plan_pruning(opened, policy, now)
    for cell, run_id in planned.runs:
        typer.echo(f"{cell}: run {run_id}")
    typer.echo(f"would go: {planned.summary}; --delete removes it")
