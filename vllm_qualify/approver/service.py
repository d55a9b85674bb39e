"""The approver: people log in with a key of their own, see a report's gates, and decide; recipes' own approvals go on beside.

A report comes from a machine that ran a model's code, so all its text is escaped, and its own page is never shown here.
"""

import logging
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Annotated
from urllib.parse import parse_qs, urlsplit

from fastapi import Depends, FastAPI, HTTPException, Request
from fastapi.responses import HTMLResponse
from jinja2 import Template

from vllm_qualify.approval.layout import checked_cell
from vllm_qualify.approval.published import read_run
from vllm_qualify.approver.decisions import Desk
from vllm_qualify.approver.people import person, read_people
from vllm_qualify.errors import CallerError, QualifyError, StoreError
from vllm_qualify.publish.store import MissingObjectError
from vllm_qualify.report.head import facts
from vllm_qualify.report.templates import template
from vllm_qualify.report.words import brief_gate_rows

LOOK_EVERY_S = 30.0
MOST_BODY_BYTES = 16 * 1024
# The pages run nothing, load nothing, and stand in no other page.
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'; img-src data:; form-action 'self';"
    " base-uri 'none'; frame-ancestors 'none'",
    "Referrer-Policy": "same-origin",
    "X-Content-Type-Options": "nosniff",
    "Cache-Control": "no-store",
}

logger = logging.getLogger(__name__)


def make_app(desk: Desk, approvers: Path, look_every_s: float = LOOK_EVERY_S) -> FastAPI:
    """The service. The file of approvers is read for each request: a person who was taken out cannot decide any more."""

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        with watching(desk, look_every_s):
            yield

    app = FastAPI(title="vllm-qualify approver", lifespan=lifespan, docs_url=None, redoc_url=None, openapi_url=None)

    def approver(request: Request) -> str:
        """Who asks. An HTTPException asks for a login."""
        name = person(read_people(approvers), request.headers.get("Authorization", ""))
        if name is None:
            raise HTTPException(401, "log in with your name and your key", {"WWW-Authenticate": 'Basic realm="approver"'})
        return name

    @app.get("/health")
    def health() -> dict[str, str]:
        return {"status": "ok"}

    @app.get("/")
    def reports(name: Annotated[str, Depends(approver)]) -> HTMLResponse:
        return _render_page("reports.html.jinja", name, lines=list(desk.lines()), store=desk.store.url)

    @app.get("/runs/{run_id}/{cell:path}")
    def report(run_id: str, cell: str, name: Annotated[str, Depends(approver)]) -> HTMLResponse:
        run = read_run(desk.store, checked_cell(cell), run_id)
        gates, holding = brief_gate_rows(run.report.judgement)
        return _render_page(
            "report.html.jinja",
            name,
            run=run,
            facts=facts(run.report),
            gates=gates,
            holding=holding,
            standing=desk.standing(run),
            why_by_hand=desk.why_by_hand(run),
            departures=list(desk.departures(run)),
            valid_days=run.report.plan.approval.valid_days,
            place=desk.store.locate(f"{run.report.prefix}/report.html"),
        )

    @app.post("/runs/{run_id}/{cell:path}", dependencies=[Depends(_from_own_page)])
    def decide(
        run_id: str, cell: str, name: Annotated[str, Depends(approver)], form: Annotated[dict[str, str], Depends(_read_form)]
    ) -> HTMLResponse:
        run = read_run(desk.store, checked_cell(cell), run_id)
        if form.get("report_sha256") != run.report_object.sha256:
            raise CallerError("this is not the report that you saw", "look at it again, and decide then", "report_sha256")
        message = desk.decide(run, form.get("decision", ""), name, form.get("reason", ""))
        logger.info("%s decided: %s", name, message)
        return _render_page("done.html.jinja", name, message=message)

    @app.exception_handler(QualifyError)
    def show_refusal(_: Request, error: QualifyError) -> HTMLResponse:
        status = 404 if isinstance(error, MissingObjectError) else 503 if isinstance(error, StoreError) else 409
        return _render_page("refused.html.jinja", "", status=status, error=error)

    return app


def _from_own_page(request: Request) -> None:
    """Refuse a form that another page sent: a browser would add the login of whoever looks at it."""
    site, origin = request.headers.get("Sec-Fetch-Site"), request.headers.get("Origin")
    is_foreign = site not in (None, "same-origin") or (origin is not None and urlsplit(origin).netloc != request.url.netloc)
    if is_foreign:
        raise HTTPException(403, "decide on the approver's own page")


async def _read_form(request: Request) -> dict[str, str]:
    """The fields of a form, each given once."""
    body = b""
    async for part in request.stream():
        body += part
        if len(body) > MOST_BODY_BYTES:
            raise HTTPException(413, "the form is too large")
    try:
        fields = parse_qs(body.decode(), keep_blank_values=True, strict_parsing=True, max_num_fields=10)
    except ValueError:
        raise HTTPException(400, "this is not a form") from None
    if any(len(values) > 1 for values in fields.values()):
        raise HTTPException(400, "a field is given twice")
    return {name: values[0] for name, values in fields.items()}


def _render_page(name: str, by: str, status: int = 200, **shown: object) -> HTMLResponse:
    return HTMLResponse(_page_template(name).render(by=by, **shown), status, HEADERS)


@cache
def _page_template(name: str) -> Template:
    style = resources.files("vllm_qualify.report").joinpath("page.css").read_text(encoding="utf-8")
    return template(__package__, name, style=style)


@contextmanager
def watching(desk: Desk, look_every_s: float) -> Iterator[None]:
    """Approve what recipes approve themselves as soon as it is published, within the block, in a thread of its own."""
    ended, seen = threading.Event(), set[tuple[str, str]]()

    def look_and_approve() -> None:
        while not ended.wait(look_every_s):
            seen.update(approve_new(desk, seen))

    thread = threading.Thread(target=look_and_approve, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def approve_new(desk: Desk, seen: set[tuple[str, str]]) -> set[tuple[str, str]]:
    """Approve each report that waits, was not seen before, and is approved by its recipe. Returns those that are settled.

    While the store does not answer a report is not settled: it is looked at again.
    """
    settled: set[tuple[str, str]] = set()
    try:
        waiting = [each for each in desk.waiting() if each not in seen]
    except StoreError as error:
        logger.warning("the store was not looked at: %s", error)
        return settled
    for cell, run_id in waiting:
        try:
            logger.info(desk.approve_automatically(cell, run_id))
        except QualifyError as error:
            logger.warning("%s: run %s is not approved: %s", cell, run_id, error)
            if error.retry:
                continue
        settled.add((cell, run_id))
    return settled
