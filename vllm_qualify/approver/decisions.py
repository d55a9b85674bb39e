"""What people and recipes decide, for one store with one key: the reports that wait, the decision, the revocation."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from vllm_qualify.approval.actions import approve, reject, revoke
from vllm_qualify.approval.decision import AUTOMATIC, Ruling, ruling, why_by_hand
from vllm_qualify.approval.errors import OtherKeyError, TamperedError
from vllm_qualify.approval.index import read_index, read_row
from vllm_qualify.approval.pointer import revocation
from vllm_qualify.approval.published import PublishedRun, read_run
from vllm_qualify.approval.row import BriefReport
from vllm_qualify.approval.signing import PrivateKey, PublicKey
from vllm_qualify.approval.verify import check_signed
from vllm_qualify.engine.image import EngineImage
from vllm_qualify.errors import CallerError
from vllm_qualify.plan.cell import CellPlan
from vllm_qualify.plan.conformity import counts_chats_as_now, difference
from vllm_qualify.publish.bundle import UnreadableError
from vllm_qualify.publish.store import MissingObjectError, Store, checked_now
from vllm_qualify.recipe.metrics import SLO_COST
from vllm_qualify.recipe.recipe import LoadedRecipe
from vllm_qualify.report.diff import changed_gates, words_of_change
from vllm_qualify.runs import judging
from vllm_qualify.runs.anchor import why_not_the_cells
from vllm_qualify.runs.baseline import departures_of_baseline
from vllm_qualify.runs.known_starts import between_by_pointers
from vllm_qualify.runs.tries import departures_of_tries

# vLLM's own, on Docker Hub.
IMAGES = ("vllm/vllm-openai",)


@dataclass(frozen=True)
class Desk:
    """Where decisions are made.

    `recipes` are this machine's own copies, by name: only they approve automatically, and only what was served from one of the
    repositories `images`, or by packages with one of the digests `engines`. A run may be started with any engine, and a recipe
    names none. Of its host's own variables a server may have had those that `inherits` names.
    """

    store: Store
    key: PrivateKey
    recipes: Mapping[str, LoadedRecipe]
    images: Collection[str] = IMAGES
    engines: Collection[str] = ()
    inherits: Collection[str] = ()
    trusted: Sequence[PublicKey] = ()
    """the keys of others who approve, beside its own"""

    def lines(self) -> Iterator[tuple[str, BriefReport]]:
        """Each cell with its newest report and those that wait for a decision, the newest first. Raises StoreError."""
        return ((row.cell, report) for row in read_index(self.store).cells for report in row.reports)

    def waiting(self) -> list[tuple[str, str]]:
        """Cell and run of each report that waits for a decision. Raises StoreError."""
        return [(cell, report.run_id) for cell, report in self.lines() if report.standing == "waiting for a decision"]

    def standing(self, run: PublishedRun) -> str:
        """What the cell's index says about a run; empty if it is not among the cell's newest. Raises StoreError."""
        return next((line.standing for line in read_row(self.store, run.cell).reports if line.run_id == run.run_id), "")

    def approve(self, run: PublishedRun, wanted: Ruling) -> str:
        """Judge the run again, sign its approval, and say so. Raises as `check_judgement` and `actions.approve`."""
        judging.check_judgement(self.store, run)
        days = run.report.plan.approval.valid_days
        done = approve(self.store, run, wanted, days, self.key, checked_now(self.store))
        return f"{run.cell}: run {run.run_id} is {done.decision.summary}, until {done.decision.expires}"

    def decide(self, run: PublishedRun, decision: str, by: str, reason: str) -> str:
        """What a person decided, and what came of it in words.

        Raises CallerError if it is not a decision, the reason is missing, or the report cannot be approved, and an error of the
        approval if another decision came before it or the content of the store cannot be trusted or read.
        """
        if decision == "approve":
            return self.approve(run, ruling("approve", by, reason))
        if decision == "reject":
            rejected = reject(self.store, run, ruling("reject", by, reason), checked_now(self.store))
            return f"{run.cell}: run {run.run_id} is {rejected.decision.summary}"
        if decision == "revoke":
            taken = revoke(self.store, run.cell, run.run_id, revocation(by, reason, checked_now(self.store)))
            return f"{run.cell}: run {taken.entry.run_id} is revoked by {by}"
        raise CallerError(f"'{decision}' is not a decision", "write approve, reject or revoke", "decision")

    def why_by_hand(self, run: PublishedRun) -> str:
        """Why a person must decide about a run; empty if the recipe may approve it. Raises StoreError.

        A plan was made on the machine that was measured. So it counts only as far as the recipe and the store here say so too.
        """
        if reason := why_by_hand(run.report):
            return reason
        name = run.report.plan.cell.recipe
        if name not in self.recipes:
            return f"is of the recipe {name}, which the approver does not have"
        return next(self.departures(run), "") or self._why_not_known(run.report.plan)

    def _why_not_known(self, plan: CellPlan) -> str:
        """What only a host knows, and the approver was not told to accept, in words that follow the run; empty if it was."""
        engine, digest = plan.server.engine, plan.cell.release.engine.digest
        if not isinstance(engine, EngineImage) and digest not in self.engines:
            return f"was served by packages of its host, {digest}, which the approver was not given"
        if others := sorted(plan.server.inherited.keys() - {*self.inherits}):
            return f"was served with variables of its host that no recipe has: {', '.join(others)}"
        is_cost_judged = any(gate.metric == SLO_COST for gate in plan.gates)
        if is_cost_judged and plan.price_usd_gpu_hour != self._recipes_price(plan):
            return "is judged by a price of an hour that is not its recipe's"
        return ""

    def _recipes_price(self, plan: CellPlan) -> float | None:
        return self.recipes[plan.cell.recipe].recipe.gpu_types[plan.cell.gpu_type].price_usd_gpu_hour

    def departures(self, run: PublishedRun) -> Iterator[str]:
        """What of a run is not as the recipe and the store here say, in words that follow it. Raises StoreError."""
        plan = run.report.plan
        recipe = self.recipes.get(plan.cell.recipe)
        if recipe and (reason := difference(plan, recipe)):
            yield f"was not qualified as the approver's recipe says: {reason}"
        elif not counts_chats_as_now(plan):
            yield "does not count chats as a plan of now does: run it again with this version"
        for engine, verb in ((plan.server.engine, "served"), (plan.client_image, "measured")):
            if isinstance(engine, EngineImage) and engine.repository not in self.images:
                yield f"was {verb} from {engine.pinned}, and the approver's images are {', '.join(self.images)}"
        yield from self._find_other_gates(run)
        yield from departures_of_tries(run, self.store, lambda run_id: not self._why_unsigned(run.cell, run_id))
        if reason := why_not_the_cells(plan, self.store):
            yield reason
        else:
            yield from departures_of_baseline(plan, self.store)
            yield from self._find_unsigned(plan)
        if plan.between:
            between = between_by_pointers(run, self.store)
            if between != plan.between and not judging.passes_with(self.store, run, between):
                yield "rests on how much starts of the server differ, and passes only by other approved runs than the store's"

    def _find_other_gates(self, run: PublishedRun) -> Iterator[str]:
        """How the gates of a report that was judged again differ from those of the run that was measured.

        It may have been judged again several times: what the first report had counts. Raises StoreError.
        """
        first, seen = run.report, {run.run_id}
        while (origin := first.rejudged_from) and origin not in seen:
            seen.add(origin)
            try:
                first = read_run(self.store, run.cell, origin).report
            except (MissingObjectError, UnreadableError):
                break
        if first.rejudged_from:
            yield f"judges run {first.rejudged_from} again, and the store has no report of that run: its gates are not known"
        elif others := changed_gates(first.plan, run.report.plan):
            yield f"judges run {first.run_id} again with other gates: {'; '.join(map(words_of_change, others))}"

    def _find_unsigned(self, plan: CellPlan) -> Iterator[str]:
        """Runs that the plan is held against and that nobody approved whom this desk knows: a pointer alone is no approval."""
        others = dict.fromkeys((other.cell.id, other.run_id) for other in (plan.baseline, plan.anchor) if other)
        for cell, run_id in others:
            if why := self._why_unsigned(cell, run_id):
                yield f"is held against run {run_id} of {cell}, whose approval cannot be trusted: {why}"

    def _why_unsigned(self, cell: str, run_id: str) -> str:
        """Why a run has no approval by a key that this desk trusts; empty if it has one."""
        try:
            check_signed(self.store, cell, run_id, [self.key.public_key, *self.trusted])
        except (TamperedError, OtherKeyError) as error:
            return error.problem
        return ""

    def approve_automatically(self, cell: str, run_id: str) -> str:
        """Approve a run if its recipe does; else say why a person must decide. Raises as `approve`."""
        run = read_run(self.store, cell, run_id)
        if why := self.why_by_hand(run):
            return f"{cell}: run {run_id} {why}: a person decides"
        return self.approve(run, AUTOMATIC)
