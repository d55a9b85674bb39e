"""Who has a GPU host's rights, a login that is not theirs, or a page of their own, and wants to decide."""

import json
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.approval.builder import CELL, NEWER, OLDER, RUN, Change, approved, made_key, publish_report, with_gate
from tests.approval.conftest import key, run, store
from tests.approver.desk import PAGE, Asked, asked, login
from tests.approver.running import Approver, approver_running
from tests.builders.changed import changed
from tests.builders.told_by_hosts import change_of, desk
from tests.html import Reader
from tests.publish.policies import let_work
from tests.report.builder import passed_report
from tests.s3 import Settings, make_bucket, settings_in
from vllm_qualify.approval.actions import revoke
from vllm_qualify.approval.layout import JSON, cell_index_key, pointer_key
from vllm_qualify.approval.pointer import read_pointer, revocation
from vllm_qualify.approval.published import PublishedRun, read_run
from vllm_qualify.approval.row import Row
from vllm_qualify.approval.signing import PrivateKey
from vllm_qualify.approver.decisions import Desk
from vllm_qualify.approver.service import approve_new
from vllm_qualify.engine.image import EngineImage
from vllm_qualify.errors import StoreError
from vllm_qualify.plan.cell import BetweenStarts, EarlierTry
from vllm_qualify.publish.layout import manifest_key
from vllm_qualify.publish.order import Counter, sequence_key
from vllm_qualify.publish.store import Store
from vllm_qualify.publish.stores import open_store
from vllm_qualify.recipe.gates import Verdict
from vllm_qualify.recipe.loading import load_recipe
from vllm_qualify.recipe.recipe import Approval
from vllm_qualify.report.model import Report
from vllm_qualify.runs import judging

__all__ = ["desk", "key", "run", "store"]

BUCKET = "deciding"
PREFECTS = {"name": "admin", "key": "the-one-password-of-the-fleet"}
AUTOMATIC = Approval(automatic=True, valid_days=30)


@pytest.fixture
def service(store: Store, key: PrivateKey, tmp_path: Path) -> Asked:
    return asked(Desk(store, key, {}), tmp_path / "approvers.json")


def form(run: PublishedRun, **changes: str) -> dict[str, str]:
    return {"decision": "approve", "reason": "it is faster", "report_sha256": run.report_object.sha256} | changes


# --- a page


DRAWN = f"/reports/{RUN}/{CELL}"


def rewrite(store: Store, name: str, change: Callable[[str], str]) -> None:
    path = Path(store.locate(f"reports/{CELL}/{RUN}/{name}"))
    path.chmod(0o644)
    path.write_text(change(path.read_text()))


def test_a_publishers_page_is_not_what_people_read_before_they_decide(service: Asked, store: Store, run: PublishedRun) -> None:
    """Its page in the store can say what it likes: the approver draws its own, from the report that its manifest names."""
    lie = "<h1>PASSED, and faster than ever</h1><script>parent.marked = 1</script>"
    rewrite(store, "report.html", lambda _: lie)
    key = service.newcomer("Ada")
    deciding = Reader(service.look(PAGE, "Ada", key).text)
    assert DRAWN in deciding.having("href")
    assert "report.html" not in deciding.text
    answer = service.look(DRAWN, "Ada", key)
    drawn = Reader(answer.text)
    assert answer.status_code == 200
    assert "faster than ever" not in drawn.text
    for expected in (CELL, RUN, run.report.plan.cell.release.revision, run.report.files[0].sha256):
        assert expected in drawn.text
    # It has no script, runs none, and leads to no file that a publisher wrote.
    assert "script" not in [tag for tag, _ in drawn.elements]
    assert answer.headers["Content-Security-Policy"].startswith("default-src 'none'; style-src 'unsafe-inline'; img-src data:;")
    assert all(address.startswith(("#", "data:,", "https://")) or address == PAGE for address in drawn.having("href"))


def test_a_drawn_page_needs_a_login_and_the_report_of_the_manifest(service: Asked, store: Store, run: PublishedRun) -> None:
    key = service.newcomer("Ada")
    assert service.look(DRAWN).status_code == 401
    rewrite(store, "report.json", lambda body: body.replace(run.report.plan.cell.release.revision, "0" * 40))
    answer = service.look(DRAWN, "Ada", key)
    assert answer.status_code == 503
    assert "the report is not what its manifest says" in answer.text


# --- a login


@pytest.mark.usefixtures("believed")
def test_nobody_decides_without_a_key_of_their_own(service: Asked, store: Store, run: PublishedRun) -> None:
    adas = service.newcomer("Ada")
    for name, wrong in (("", ""), ("admin", PREFECTS["key"]), ("Ada", ""), ("Ada", adas[:-1]), ("Bob", adas), ("recipe", adas)):
        assert service.look(PAGE, name, wrong).status_code == 401
        assert service.decide(form(run), name, wrong).status_code == 401
    assert not list(store.keys("approvals/"))


@pytest.mark.usefixtures("believed")
def test_the_name_of_a_decision_is_the_logins_and_not_the_forms(service: Asked, store: Store, run: PublishedRun) -> None:
    service.decide(form(run, name="Ada", by="Ada"), "Bob", service.newcomer("Bob"))
    pointer = read_pointer(store, CELL)
    assert pointer is not None
    assert pointer.last.by == "Bob"


@pytest.mark.usefixtures("believed")
def test_a_person_who_was_taken_out_cannot_decide_any_more(service: Asked, store: Store, run: PublishedRun) -> None:
    bobs = service.newcomer("Bob")
    assert service.look(PAGE, "Bob", bobs).status_code == 200
    service.approvers.write_text("{}")
    assert service.decide(form(run), "Bob", bobs).status_code == 401
    assert not list(store.keys("approvals/"))


# --- a page that Ada's browser opens while she is logged in


@pytest.mark.usefixtures("believed")
@pytest.mark.parametrize(
    ("headers", "is_own"),
    [
        ({"Origin": "https://evil.example.com"}, False),
        ({"Origin": "null"}, False),
        ({"Origin": "https://approver.example.com.evil.example.com"}, False),
        ({"Sec-Fetch-Site": "cross-site"}, False),
        ({"Sec-Fetch-Site": "same-site"}, False),
        ({"Sec-Fetch-Site": "same-site", "Origin": "https://approver.example.com"}, False),
        ({"Sec-Fetch-Site": "same-origin", "Origin": "https://approver.example.com"}, True),
    ],
)
def test_only_the_approvers_own_page_can_decide_with_adas_login(
    service: Asked, store: Store, run: PublishedRun, headers: dict[str, str], is_own: bool
) -> None:
    answer = service.decide(form(run), "Ada", service.newcomer("Ada"), **headers)
    assert answer.status_code == (200 if is_own else 403)
    assert bool(list(store.keys("approvals/"))) is is_own


def test_no_page_shows_what_a_report_brings_as_its_own(service: Asked, store: Store, tmp_path: Path) -> None:
    """And no page of the approver stands in another one, runs anything or loads anything."""
    script = "<script>alert(1)</script>"

    def hostile(report: Report) -> Report:
        gates = [verdict.model_copy(update={"because": script}) for verdict in report.judgement.gates]
        return changed(changed(report, "judgement", gates=gates), "plan.fingerprint", name=script)

    publish_report(store, tmp_path / "runs", change=hostile)
    adas = service.newcomer("Ada")
    for page in ("/", PAGE):
        answer = service.look(page, "Ada", adas)
        assert answer.status_code == 200
        assert "script" not in {tag for tag, _ in Reader(answer.text).elements}
        policy = answer.headers["Content-Security-Policy"]
        assert "default-src 'none'" in policy
        assert "frame-ancestors 'none'" in policy
        assert "script-src" not in policy


@pytest.mark.parametrize("body", [b"x" * 20_000, b"\xff", b"decision=approve&decision=reject", b"a=1&" * 50, b""])
@pytest.mark.usefixtures("run")
def test_a_hostile_form_is_refused(service: Asked, body: bytes) -> None:
    headers = login("Ada", service.newcomer("Ada")) | {"Content-Type": "application/x-www-form-urlencoded"}
    assert service.client.post(PAGE, content=body, headers=headers).status_code in (400, 409, 413)


# --- a plan that says of itself that nobody need decide


def assert_for_a_person(desk: Desk, run: PublishedRun, why: str) -> None:
    assert desk.why_by_hand(run) == why
    assert "a person decides" in desk.approve_automatically(CELL, RUN)
    assert not list(desk.store.keys("approvals/"))


@pytest.mark.usefixtures("believed")
def test_a_plan_cannot_approve_itself(store: Store, key: PrivateKey, tmp_path: Path) -> None:
    """A host wrote it. Only the approver's own copy of a recipe says what is automatic, and by which gates."""
    publish_report(store, tmp_path / "runs", change=change_of("plan", approval=AUTOMATIC))
    other = load_recipe("reference")
    for recipes in ({}, {"llama-3.1-8b": other}):
        assert approve_new(Desk(store, key, recipes), set()) == {(CELL, RUN)}
        assert not list(store.keys("approvals/"))


def counting(*tries: EarlierTry) -> Change:
    return change_of("plan", approval=AUTOMATIC, tries=list(tries))


def test_a_plan_that_leaves_out_its_releases_earlier_tries_is_for_a_person(desk: Desk, store: Store, tmp_path: Path) -> None:
    """Also where the host took them out of the index: the manifests are there, and it cannot delete them."""
    publish_report(store, tmp_path / "runs", OLDER, with_gate("fail"))
    hiding = publish_report(store, tmp_path / "runs", RUN, counting())
    store.swap(cell_index_key(CELL), Row(cell=CELL).model_dump_json().encode(), JSON, store.read(cell_index_key(CELL)).tag)
    assert_for_a_person(desk, hiding, f"does not count {OLDER}, in which its release did not pass")
    honest = publish_report(store, tmp_path / "runs", NEWER, counting(EarlierTry(run_id=OLDER, verdict="fail")))
    assert desk.why_by_hand(honest) == ""


@pytest.mark.parametrize("number", [1, 2])
def test_a_run_with_the_number_of_another_one_hides_no_tries(desk: Desk, store: Store, tmp_path: Path, number: int) -> None:
    """A publisher can take the number of a run that was published before, or draw one first and use it later."""
    for run_id in (RUN, NEWER):
        publish_report(store, tmp_path / "runs", run_id, with_gate("fail"))
    publish_report(store, tmp_path / "runs", OLDER, counting())
    forge(store, OLDER, lambda manifest: manifest.update(sequence=number))
    hiding = read_run(store, CELL, OLDER)
    assert_for_a_person(desk, hiding, f"does not count {RUN}, {NEWER}, in which its release did not pass")


@pytest.mark.parametrize("verdict", ["pass", "invalid"])
def test_a_plan_that_names_its_releases_tries_and_counts_none_is_for_a_person(
    desk: Desk, store: Store, tmp_path: Path, verdict: Verdict
) -> None:
    """It says that the try decided nothing, or makes a later pass up."""
    publish_report(store, tmp_path / "runs", OLDER, with_gate("fail"))
    named = [EarlierTry(run_id=OLDER, verdict="fail"), EarlierTry(run_id=NEWER, verdict="pass")]
    tries = named if verdict == "pass" else [EarlierTry(run_id=OLDER, verdict="invalid")]
    hiding = publish_report(store, tmp_path / "runs", RUN, counting(*tries))
    assert_for_a_person(desk, hiding, f"does not count {OLDER}, in which its release did not pass")


def test_a_readme_added_to_the_weights_begins_no_new_count(desk: Desk, store: Store, tmp_path: Path) -> None:
    files = {"config.json": "1" * 64, "model.safetensors": "2" * 64}
    weights = change_of("plan.cell.release", files=files, revision=f"sha256:{'1' * 64}")
    with_readme = change_of("plan.cell.release", files=files | {"README.md": "3" * 64}, revision=f"sha256:{'2' * 64}")
    publish_report(store, tmp_path / "runs", OLDER, lambda report: weights(with_gate("fail")(report)))
    again = publish_report(store, tmp_path / "runs", RUN, lambda report: with_readme(counting()(report)))
    assert_for_a_person(desk, again, f"does not count {OLDER}, in which its release did not pass")


FORGED: dict[str, Callable[[dict[str, Any]], object]] = {
    "no try": lambda manifest: manifest.update(tried=None),
    "of another release": lambda manifest: manifest["tried"].update(release="0" * 64),
    "it passed": lambda manifest: manifest["tried"].update(verdict="pass"),
    "no manifest": lambda manifest: manifest.clear(),
    "another report": lambda manifest: manifest["objects"].clear(),
}


@pytest.mark.parametrize("how", FORGED)
def test_an_earlier_try_cannot_be_hidden_by_its_own_manifest(desk: Desk, store: Store, tmp_path: Path, how: str) -> None:
    """A publisher writes each manifest, and no one but the report says how the run ended."""
    publish_report(store, tmp_path / "runs", OLDER, with_gate("fail"))
    forge(store, OLDER, FORGED[how])
    hiding = publish_report(store, tmp_path / "runs", RUN, counting())
    assert_for_a_person(desk, hiding, f"is of a cell with runs that are not what they say: {OLDER}")


OWN_WORDS: dict[str, Callable[[dict[str, Any]], object]] = {
    "anchor": lambda manifest: manifest.update(anchor=OLDER),
    "summary": lambda manifest: manifest["summary"].update(output_tok_s_per_gpu=1e9),
    "tried": lambda manifest: manifest.update(tried=None),
}


@pytest.mark.parametrize("field", OWN_WORDS)
def test_a_run_whose_manifest_says_what_its_report_does_not_is_not_read(store: Store, tmp_path: Path, field: str) -> None:
    publish_report(store, tmp_path / "runs", RUN)
    forge(store, RUN, OWN_WORDS[field])
    with pytest.raises(StoreError, match=f"its manifest says of {field} what its report does not"):
        read_run(store, CELL, RUN)


def test_a_run_with_a_number_that_the_store_never_gave_closes_no_cell(store: Store, key: PrivateKey, tmp_path: Path) -> None:
    """Once it were approved, every later run would be older, for good."""
    publish_report(store, tmp_path / "runs", OLDER)
    forge(store, OLDER, lambda manifest: manifest.update(sequence=2**62))
    with pytest.raises(StoreError, match=r"number 4611686018427387904 of its cell, and the store gave 1 numbers"):
        approved(store, read_run(store, CELL, OLDER), key)
    assert approved(store, publish_report(store, tmp_path / "runs", RUN), key).pointer.last.run_id == RUN


@pytest.mark.parametrize(("ahead", "is_refused"), [(2**62, True), (100_001, True), (100_000, False)])
def test_a_counter_that_was_set_forward_and_back_closes_no_cell(
    store: Store, key: PrivateKey, tmp_path: Path, ahead: int, is_refused: bool
) -> None:
    publish_report(store, tmp_path / "runs", OLDER)
    set_counter(store, ahead)
    forge(store, OLDER, lambda manifest: manifest.update(sequence=ahead))
    if is_refused:
        with pytest.raises(
            StoreError, match="the last approved one is number 0: no cell has so many runs between two approvals"
        ):
            approved(store, read_run(store, CELL, OLDER), key)
    else:
        approved(store, read_run(store, CELL, OLDER), key)
    set_counter(store, 1)
    assert approved(store, publish_report(store, tmp_path / "runs", RUN), key).pointer.last.run_id == RUN


def set_counter(store: Store, last: int) -> None:
    place = sequence_key(CELL)
    store.swap(place, Counter(last=last).model_dump_json().encode(), JSON, store.read(place).tag)


@pytest.mark.parametrize("change", [lambda manifest: manifest.update(sequence=None), lambda manifest: manifest.pop("sequence")])
def test_a_run_without_a_number_hides_no_failed_tries(
    desk: Desk, store: Store, tmp_path: Path, change: Callable[[dict[str, Any]], object]
) -> None:
    """As if it were the first of its cell, before all tries that failed."""
    publish_report(store, tmp_path / "runs", OLDER, with_gate("fail"))
    publish_report(store, tmp_path / "runs", RUN, counting())
    forge(store, RUN, change)
    with pytest.raises(StoreError, match="not a manifest: sequence: "):
        desk.why_by_hand(read_run(store, CELL, RUN))


def forge(store: Store, run_id: str, change: Callable[[dict[str, Any]], object]) -> None:
    key = manifest_key(CELL, run_id)
    body, tag = store.read(key)
    manifest = json.loads(body)
    change(manifest)
    store.swap(key, json.dumps(manifest).encode(), JSON, tag)


def test_an_image_of_another_repository_is_for_a_person(desk: Desk, store: Store, key: PrivateKey, tmp_path: Path) -> None:
    """Whoever starts a run names its image, and no recipe does: an image of their own must not be approved by itself."""
    digest = f"sha256:{'e' * 64}"

    def served_from(repository: str) -> Change:
        image = EngineImage(repository=repository, tag=None, digest=digest, platform="linux/amd64")
        return lambda report: changed(changed(report, "plan.server", engine=image), "plan", approval=AUTOMATIC)

    evil = publish_report(store, tmp_path / "runs", RUN, served_from("evil.example/vllm/vllm-openai"))
    said = f"was served from evil.example/vllm/vllm-openai@{digest}, and the approver's images are vllm/vllm-openai"
    assert_for_a_person(desk, evil, said)
    own = publish_report(store, tmp_path / "runs", NEWER, served_from("registry.example/ours"))
    assert Desk(store, key, desk.recipes, ["registry.example/ours"]).why_by_hand(own) == ""


@pytest.mark.parametrize(
    ("change", "told", "why"),
    [
        (change_of("plan", approval=AUTOMATIC), {}, "was served by packages of its host, sha256:"),
        (
            change_of("plan.server", inherited={"VLLM_EXTRA": "1", "OMP_NUM_THREADS": "2"}),
            {"inherits": ["OMP_NUM_THREADS"]},
            "was served with variables of its host that no recipe has: VLLM_EXTRA",
        ),
        (
            change_of(
                "plan", client_image=EngineImage(repository="evil.example/vllm", tag=None, digest=None, platform="linux/amd64")
            ),
            {},
            "was measured from evil.example/vllm",
        ),
    ],
)
def test_what_only_a_host_knows_is_for_a_person_unless_the_approver_was_told(
    desk: Desk, store: Store, key: PrivateKey, tmp_path: Path, change: Change, told: dict[str, Any], why: str
) -> None:
    """An approval carries the engine and all variables on to whoever deploys it."""
    run = publish_report(store, tmp_path / "runs", change=lambda of: changed(change(of), "plan", approval=AUTOMATIC))
    engines = [] if "packages" in why else desk.engines
    strict = Desk(store, key, desk.recipes, engines=engines, **told)
    assert strict.why_by_hand(run).startswith(why)
    told = {"engines": desk.engines, "inherits": ["OMP_NUM_THREADS", "VLLM_EXTRA"], "images": ["evil.example/vllm"]}
    assert Desk(store, key, desk.recipes, **told).why_by_hand(run) == ""


def test_a_plan_that_leaves_out_how_chats_are_counted_is_for_a_person(
    desk: Desk, store: Store, key: PrivateKey, tmp_path: Path
) -> None:
    """A role that comes at once would be its first token. Who has no recipe to hold it against is told, too."""
    whole = passed_report().plan.load.model_copy(update={"api": "chat", "window": "whole", "counted_from": None})
    run = publish_report(store, tmp_path / "runs", RUN, change_of("plan", approval=AUTOMATIC, load=whole))
    why = "does not count chats as a plan of now does: run it again with this version"
    assert_for_a_person(desk, run, why)
    assert [*Desk(store, key, {}).departures(run)] == [why]


def test_whoever_judges_again_without_a_gate_is_found_out(desk: Desk, store: Store, tmp_path: Path) -> None:
    """Also by a second judging with the same gates; what the run itself was measured for counts."""
    first = publish_report(store, tmp_path / "runs", OLDER)
    (gone, *kept) = first.report.plan.gates
    runs: list[PublishedRun] = []
    for run_id, origin in ((RUN, OLDER), (NEWER, RUN)):
        change = change_of("plan", approval=AUTOMATIC, gates=kept)
        runs.append(publish_report(store, tmp_path / "runs", run_id, judged_from(origin, change)))
    told = f"judges run {OLDER} again with other gates: {gone.label} removed: "
    assert all(any(line.startswith(told) for line in desk.departures(run)) for run in runs)
    assert all("again with other gates" in desk.why_by_hand(run) for run in runs)


@pytest.mark.parametrize("origin", ["20260101T000000Z-abcdef", RUN])
def test_a_report_that_was_judged_again_from_a_run_that_is_nowhere_is_for_a_person(
    desk: Desk, store: Store, tmp_path: Path, origin: str
) -> None:
    """Or from itself."""
    run = publish_report(store, tmp_path / "runs", RUN, judged_from(origin, change_of("plan", approval=AUTOMATIC)))
    why = f"judges run {origin} again, and the store has no report of that run: its gates are not known"
    assert why in [*desk.departures(run)]
    assert desk.why_by_hand(run) == why


def test_a_report_that_was_judged_again_by_the_same_gates_tells_of_none(desk: Desk, store: Store, tmp_path: Path) -> None:
    publish_report(store, tmp_path / "runs", OLDER)
    run = publish_report(store, tmp_path / "runs", RUN, judged_from(OLDER, change_of("plan", approval=AUTOMATIC)))
    assert not [line for line in desk.departures(run) if line.startswith("judges run")]


def judged_from(origin: str, change: Change) -> Change:
    return lambda report: changed(change(report), rejudged_from=origin)


def test_a_plan_that_makes_up_how_little_starts_differ_is_for_a_person(
    desk: Desk, store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The approver judges by what the store's approved runs show, here nothing. What they show may do for the gates, too."""
    known = BetweenStarts(label="ttft_p50_ms", variance=0.0, noise=0.0, freedom=1000.0, runs=[OLDER])
    run = publish_report(store, tmp_path / "runs", RUN, change_of("plan", approval=AUTOMATIC, between=[known]))
    judged_by: list[object] = []

    def passes_with(_store: Store, _run: object, between: object, *, passes: bool) -> bool:
        judged_by.append(between)
        return passes

    monkeypatch.setattr(judging, "passes_with", partial(passes_with, passes=False))
    why = "rests on how much starts of the server differ, and passes only by other approved runs than the store's"
    assert_for_a_person(desk, run, why)
    monkeypatch.setattr(judging, "passes_with", partial(passes_with, passes=True))
    assert desk.why_by_hand(run) == ""
    assert judged_by == [[], [], []]


# --- a GPU host's rights to the store


@pytest.fixture(scope="module")
def approver(radosgw_settings: Settings, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Approver]:
    make_bucket(radosgw_settings, BUCKET)
    let_work(radosgw_settings, BUCKET, denied="publisher")
    with approver_running(f"s3://{BUCKET}", tmp_path_factory.mktemp("approver"), radosgw_settings) as running:
        yield running


def use(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> Store:
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    return open_store(f"s3://{BUCKET}")


@pytest.mark.s3
@pytest.mark.usefixtures("believed")
def test_a_gpu_hosts_credentials_publish_and_neither_approve_nor_revoke_nor_move_a_pointer(
    approver: Approver, radosgw_settings: Settings, radosgw_directory: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    host = use(settings_in(radosgw_directory / "env.denied"), monkeypatch)
    run = publish_report(host, tmp_path / "runs")
    own_key = made_key(tmp_path / "hosts.pem")
    with pytest.raises(StoreError, match="AccessDenied"):
        approved(host, run, own_key, datetime.now(UTC))
    assert approver.decide(CELL, RUN, form(run), **PREFECTS).status_code == 401
    assert not list(host.keys("approvals/"))

    owner = use(radosgw_settings, monkeypatch)
    approved(owner, run, own_key, datetime.now(UTC))
    pointer = owner.read(pointer_key(CELL))
    host = use(settings_in(radosgw_directory / "env.denied"), monkeypatch)
    with pytest.raises(StoreError, match="AccessDenied"):
        revoke(host, CELL, None, revocation("Eve", "because", datetime.now(UTC)))
    with pytest.raises(StoreError, match="AccessDenied"):
        host.swap(pointer_key(CELL), b"{}", "application/json", pointer.tag)
    assert host.read(pointer_key(CELL)) == pointer
