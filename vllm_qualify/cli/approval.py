"""The commands of approvals: decide, revoke, look up, deploy, verify."""

import sys
from datetime import UTC, datetime
from json import dumps as dump_json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from vllm_qualify.approval.layout import Format
from vllm_qualify.cli.words import NOT_PASSED, StoreOption, open_named_store, tell, warn
from vllm_qualify.secrets import safe_text

if TYPE_CHECKING:
    from vllm_qualify.approval.here.finding import Compared
    from vllm_qualify.approval.published import PublishedRun
    from vllm_qualify.approval.signing import PublicKey
    from vllm_qualify.approval.verify import Verified
    from vllm_qualify.publish.store import Store

# More than the longest cell name and its other columns take.
WIDTH_OF_PIPES = 1_000
CODES = (
    "Exit codes: 0 done, or it holds, 2 the caller's mistake, 3 the world's fault, 10 missing or tampered with,"
    " 11 another key's, 12 expired, 13 superseded, 14 revoked, 15 signed and never in force, 16 dated in the future."
)
CODE_OF_HERE = "0 it holds, 1 what is deployed differs or could not be compared"

ReportArgument = Annotated[str, typer.Argument(metavar="REPORT", help="A run's id, its folder or its report.json.")]
CellArgument = Annotated[str, typer.Argument(metavar="CELL", help="Like reference/bf16/cpu/balanced.")]
By = Annotated[str, typer.Option("--by", metavar="NAME", help="Who decides.")]
Reason = Annotated[str, typer.Option("--reason", metavar="TEXT", help="Why; it is kept.")]
PublicKeys = Annotated[
    list[Path] | None,
    typer.Option("--public-key", metavar="FILE", help="To trust, also repeated; by default VLLM_QUALIFY_PUBLIC_KEY[_FILE]."),
]

approved_app = typer.Typer(help="Look up approvals and deploy what they approve.", no_args_is_help=True)
key_app = typer.Typer(help="Keys that sign approvals.", no_args_is_help=True)


def add_to(app: typer.Typer) -> None:
    for command in (approve, reject, revoke):
        app.command(epilog=CODES)(command)
    app.command(epilog=CODES.replace("0 done, or it holds", CODE_OF_HERE))(verify)
    app.add_typer(approved_app, name="approved")
    app.add_typer(key_app, name="key")


def approve(
    report: ReportArgument,
    by: By,
    reason: Reason,
    store: StoreOption = None,
    valid_days: Annotated[int | None, typer.Option(min=1, max=3650, help="By default the recipe's.")] = None,
) -> None:
    """Approve a published report that passed. Its evidence is judged again first, and the approval is signed.

    What of the run is not as the store has it is told, and stops nothing: other tries, another baseline, another's image.

    The key is VLLM_QUALIFY_PRIVATE_KEY (PEM) or VLLM_QUALIFY_PRIVATE_KEY_FILE. The password of an encrypted key is
    VLLM_QUALIFY_PRIVATE_KEY_PASSWORD[_FILE], or is asked for on a terminal.
    """
    from vllm_qualify.approval.actions import approve as sign_and_publish
    from vllm_qualify.approval.decision import ruling
    from vllm_qualify.approval.signing import keys_of_others, private_key
    from vllm_qualify.approver.decisions import Desk
    from vllm_qualify.publish.store import checked_now
    from vllm_qualify.runs.judging import check_judgement

    wanted, key = ruling("approve", by, reason), private_key(ask=_ask_passphrase if _is_terminal() else None)
    opened = open_named_store(store)
    run = _read_run(opened, report)
    check_judgement(opened, run)
    for departure in Desk(opened, key, {}, trusted=keys_of_others()).departures(run):
        tell(f"note: run {run.report.run_id} {departure}")
    days = valid_days or run.report.plan.approval.valid_days
    done = sign_and_publish(opened, run, wanted, days, key, checked_now(opened))
    typer.echo(f"{run.cell}: {done.decision.summary}, until {done.decision.expires}")
    typer.echo(opened.locate(done.approval.key))
    warn(done.index_problem)


def reject(report: ReportArgument, by: By, reason: Reason, store: StoreOption = None) -> None:
    """Decide that a report is not to be deployed. Its verdict does not matter."""
    from vllm_qualify.approval.actions import reject as keep_rejection
    from vllm_qualify.approval.decision import ruling
    from vllm_qualify.publish.store import checked_now

    wanted, opened = ruling("reject", by, reason), open_named_store(store)
    run = _read_run(opened, report)
    done = keep_rejection(opened, run, wanted, checked_now(opened))
    typer.echo(f"{run.cell}: {done.decision.summary}")
    warn(done.index_problem)


def revoke(
    cell: CellArgument,
    by: By,
    reason: Reason,
    run: Annotated[str | None, typer.Option(metavar="RUN", help="By default the cell's last approval.")] = None,
    store: StoreOption = None,
) -> None:
    """Revoke an approval at once. It takes no key, only the right to write the cell's pointer."""
    from vllm_qualify.approval.actions import revoke as take_back
    from vllm_qualify.approval.layout import checked_cell
    from vllm_qualify.approval.pointer import revocation
    from vllm_qualify.publish.store import checked_now

    opened, of = open_named_store(store), checked_cell(cell)
    done = take_back(opened, of, run, revocation(by, reason, checked_now(opened)))
    typer.echo(f"{cell}: run {done.entry.run_id} is revoked")
    if not done.pointer.last.revoked:
        typer.echo(f"run {done.pointer.last.run_id}, {done.pointer.last.summary}, is in force", err=True)
    warn(done.index_problem)


@approved_app.command("list", epilog=CODES)
def approved_list(
    store: StoreOption = None, json: Annotated[bool, typer.Option("--json", help="As JSON, for programs.")] = False
) -> None:
    """Every cell that was ever approved, and its last approval's state. Signatures are not checked: see verify."""
    from vllm_qualify.approval.matrix import as_json, matrix, table

    opened = open_named_store(store)
    cells = matrix(opened, datetime.now(UTC).date())
    if json:
        typer.echo(as_json(cells))
    elif cells:
        from rich.console import Console

        # Programs read whole lines.
        Console(width=None if sys.stdout.isatty() else WIDTH_OF_PIPES).print(table(cells))
    else:
        tell(f"nothing was ever approved in {opened.url}")


@approved_app.command("get", epilog=CODES)
def approved_get(
    cell: CellArgument,
    format: Annotated[Format, typer.Option("--format", help="What to deploy it with.")] = "config",  # noqa: A002  (the option's name)
    public_key: PublicKeys = None,
    store: StoreOption = None,
) -> None:
    """The configuration that was qualified, ready to be deployed. The approval is verified first."""
    from vllm_qualify.approval.formats import deployable, deployment_name
    from vllm_qualify.approval.verify import verify
    from vllm_qualify.engine.kinds.registry import KINDS
    from vllm_qualify.recipe.code import code_of_server, openings_of_server

    verified = verify(open_named_store(store), cell, _read_keys(public_key), datetime.now(UTC))
    known = {"cell": verified.cell, "run": verified.run_id, "approved-by": verified.by, "expires": str(verified.expires)}
    release = verified.qualified_release
    known["engine"] = f"{KINDS[release.engine.kind].title} {release.engine.version} {release.engine.digest}"
    known["model"] = f"{release.model} at {release.revision}"
    if code := code_of_server(verified.server.arguments, verified.server.environment):
        known["trusts"] = "; ".join(code)
    if openings := openings_of_server(verified.server.arguments, verified.server.environment):
        known["opens"] = "; ".join(openings)
    typer.echo(deployable(verified.server, format, deployment_name(cell), known), nl=False)


@approved_app.command("export", epilog=CODES)
def approved_export(
    cell: CellArgument,
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="A new or an empty one.")],
    run: Annotated[str | None, typer.Option(metavar="RUN", help="By default the cell's last approval.")] = None,
    store: StoreOption = None,
) -> None:
    """Copy an approval with all its evidence into a folder. There `verify` needs no network."""
    from vllm_qualify.approval.verify import export

    typer.echo(folder.absolute() / export(open_named_store(store), cell, folder, run).key)


def verify(
    what: Annotated[str, typer.Argument(metavar="FILE|CELL", help="An approval.json, or a cell of the store.")],
    public_key: PublicKeys = None,
    store: StoreOption = None,
    deep: Annotated[bool, typer.Option("--deep", help="Judge the evidence again, too.")] = False,
    here: Annotated[
        list[str] | None,
        typer.Option("--here", metavar="FOLDER|IMAGE|URL", help="Compare what is deployed with the approval; also repeated."),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="What holds, with the signed statement, as JSON.")] = False,
) -> None:
    """Check whether an approval holds.

    That is its signature, its state and expiry, every gate of the plan, and the digest of every piece of evidence.
    With --here: also whether a folder of weights, an image or a server is what was approved.
    """
    from vllm_qualify.approval.published import read_run
    from vllm_qualify.approval.verify import store_of_file, verify_file
    from vllm_qualify.approval.verify import verify as verify_cell

    now, keys, again = datetime.now(UTC), _read_keys(public_key), ""
    is_file = what.endswith(".json") or Path(what).is_file()
    verified = verify_file(Path(what), keys, now) if is_file else verify_cell(open_named_store(store), what, keys, now)
    if deep:
        from vllm_qualify.runs.judging import check_judgement

        opened = store_of_file(Path(what)) if is_file else open_named_store(store)
        unscored = check_judgement(opened, read_run(opened, verified.cell, verified.run_id))
        again = ", and judged again" + (f"; as lm-eval scored them: {', '.join(unscored)}" if unscored else "")
    compared = []
    if here:
        evidence = (store_of_file(Path(what)) if is_file else open_named_store(store)) if verified.is_whole else None
        compared = _compare_deployed(here, verified, evidence)
    if json:
        found = {"here": [each.model_dump() for each in compared]} if here else {}
        typer.echo(dump_json(verified.model_dump(mode="json") | found, indent=2))
    else:
        typer.echo(verified.summary + again)
        _show_compared(compared)
    if any(each.differs or not each.tells_something for each in compared):
        raise typer.Exit(NOT_PASSED)


def _compare_deployed(targets: list[str], verified: "Verified", evidence: "Store | None") -> "list[Compared]":
    """Each target with its findings. `evidence` is the store of the approved run, if it is at hand."""
    from vllm_qualify.approval.here.targets import compare_target, is_address
    from vllm_qualify.approval.published import read_run

    own_page = None
    if evidence and any(map(is_address, targets)):
        from vllm_qualify.approval.here.server import read_own_page

        own_page = read_own_page(evidence, read_run(evidence, verified.cell, verified.run_id))
    return [compare_target(target, verified, own_page) for target in targets]


def _show_compared(compared: "list[Compared]") -> None:
    for each in compared:
        typer.echo(safe_text(f"{each.kind} {each.target}: {each.summary}"))
        for found in each.findings:
            typer.echo(safe_text(found.line))


@key_app.command("new", epilog="Exit codes: 0 done, 2 the caller's mistake, 3 the world's fault.")
def key_new(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="The private key; the public one is FILE.pub.")],
    no_passphrase: Annotated[
        bool, typer.Option("--no-passphrase", help="Do not encrypt it: whoever has FILE can sign.")
    ] = False,
) -> None:
    """Make a key pair to sign approvals with (Ed25519).

    The private key is encrypted with a passphrase: VLLM_QUALIFY_PRIVATE_KEY_PASSWORD[_FILE], or it is asked for on a terminal.
    """
    from vllm_qualify.approval.signing import PASSWORD, key_password, new_key, short_id
    from vllm_qualify.errors import CallerError

    password = None if no_passphrase else key_password()
    if not no_passphrase and not password:
        if not _is_terminal():
            remedy = f"set {PASSWORD}_FILE to a file that holds one, or leave it out with --no-passphrase"
            raise CallerError("there is no passphrase for the key, and no terminal to ask for one", remedy, "key new")
        password = _ask_passphrase(is_new=True).encode()
    key = new_key(file.expanduser(), password)
    typer.echo(f"key {short_id(key.keyid)}: keep {file} secret, and give {file}.pub to whoever verifies")


def _is_terminal() -> bool:
    return sys.stdin.isatty() and sys.stderr.isatty()


def _ask_passphrase(*, is_new: bool = False) -> str:
    """Ask for the passphrase, twice for a new key. What is typed is not shown."""
    return str(typer.prompt("Passphrase of the private key", hide_input=True, confirmation_prompt=is_new, err=True))


def _read_run(store: "Store", name: str) -> "PublishedRun":
    """The published run. A file that was named must be its report: what is decided about is what the person saw."""
    from vllm_qualify.approval.layout import sha256
    from vllm_qualify.errors import CallerError
    from vllm_qualify.runs.folder import report_file, run_id_of
    from vllm_qualify.runs.stored import published_run

    run, file = published_run(store, run_id_of(name)), report_file(name)
    if file and sha256(file.read_bytes()) != run.report_object.sha256:
        remedy = f"look at the published one, and name it by its id: {run.run_id}"
        raise CallerError("this file is not the report that was published", remedy, str(file))
    return run


def _read_keys(files: list[Path] | None) -> "list[PublicKey]":
    from vllm_qualify.approval.signing import public_keys

    return public_keys(files or [])
