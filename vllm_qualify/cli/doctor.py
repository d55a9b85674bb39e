"""The command `doctor`."""

from typing import Annotated

import typer

from vllm_qualify.cli.words import WORLD


def doctor(
    clean: Annotated[bool, typer.Option("--clean", help="Remove the containers that killed runs left behind.")] = False,
) -> None:
    """Show what this machine has and lacks, one line each with the remedy."""
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
