"""The approver: people log in with a key of their own, see a report's gates, and decide; recipes' own approvals go on beside.

A report comes from a machine that ran a model's code, so all its text is escaped, and its own page is never shown here. The
page of a report is drawn here, from the report that its manifest names.
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
from fastapi.responses import HTMLResponse, JSONResponse
from jinja2 import Template

from vllm_qualify.approval.layout import checked_cell
from vllm_qualify.approval.published import read_run
from vllm_qualify.approver.decisions import Desk
from vllm_qualify.approver.people import person, read_people
from vllm_qualify.errors import CallerError, QualifyError, StoreError
from vllm_qualify.publish.store import MissingObjectError
from vllm_qualify.report.head import facts
from vllm_qualify.report.page import render_page
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

    watch = Watch(desk, look_every_s)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        with watch.running():
            yield

    app = FastAPI(title="vllm-qualify approver", lifespan=lifespan, docs_url=None, redoc_url=None, openapi_url=None)

    def approver(request: Request) -> str:
        """Who asks. An HTTPException asks for a login."""
        name = person(read_people(approvers), request.headers.get("Authorization", ""))
        if name is None:
            raise HTTPException(401, "log in with your name and your key", {"WWW-Authenticate": 'Basic realm="approver"'})
        return name

    @app.get("/health")
    def health() -> JSONResponse:
        if problem := watch.problem:
            return JSONResponse({"status": problem}, 503)
        return JSONResponse({"status": "ok"})

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
            place=desk.store.locate(run.report_object.key),
        )

    @app.get("/reports/{run_id}/{cell:path}", dependencies=[Depends(approver)])
    def whole_report(run_id: str, cell: str) -> HTMLResponse:
        return HTMLResponse(render_page(read_run(desk.store, checked_cell(cell), run_id).report), headers=HEADERS)

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


class Watch:
    """Approves what recipes approve themselves, as soon as it is published, in a thread of its own."""

    def __init__(self, desk: Desk, look_every_s: float) -> None:
        self._desk, self._look_every_s = desk, look_every_s
        self._ended, self._seen = threading.Event(), set[tuple[str, str]]()
        self._thread: threading.Thread | None = None
        self._last_problem = ""

    @property
    def problem(self) -> str:
        """Why nothing is approved by itself at present; empty if it is, or the watch was never begun."""
        is_lost = self._thread is not None and not self._thread.is_alive() and not self._ended.is_set()
        return "the thread of the automatic approvals has ended" if is_lost else self._last_problem

    @contextmanager
    def running(self) -> Iterator[None]:
        """Watch within the block."""
        self._thread = threading.Thread(target=self._look_and_approve, daemon=True)
        self._thread.start()
        try:
            yield
        finally:
            self._ended.set()
            self._thread.join()

    def _look_and_approve(self) -> None:
        while not self._ended.wait(self._look_every_s):
            try:
                self._seen.update(approve_new(self._desk, self._seen))
                self._last_problem = ""
            except StoreError as error:
                logger.warning("the store was not looked at: %s", error)
                self._last_problem = "the store could not be looked at"
            except Exception as error:
                # Anybody who may publish writes what is read here. It must not end the approvals of all others.
                logger.exception("the look at the store failed")
                self._last_problem = f"the look at the store failed: {type(error).__name__}"


def approve_new(desk: Desk, seen: set[tuple[str, str]]) -> set[tuple[str, str]]:
    """Approve each report that waits, was not seen before, and is approved by its recipe. Returns those that are settled.

    While the store does not answer a report is not settled: it is looked at again. Raises StoreError.
    """
    settled: set[tuple[str, str]] = set()
    for cell, run_id in [each for each in desk.waiting() if each not in seen]:
        try:
            logger.info(desk.approve_automatically(cell, run_id))
        except QualifyError as error:
            logger.warning("%s: run %s is not approved: %s", cell, run_id, error)
            if error.retry:
                continue
        except Exception:
            # Its publisher wrote what is read of it. No run may keep others from being approved, nor be tried for ever.
            logger.exception("%s: run %s is not approved: it cannot be read", cell, run_id)
        settled.add((cell, run_id))
    return settled
