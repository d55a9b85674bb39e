"""The page's text: whole, and escaped. `test_opened` opens it in a browser."""

import re
from collections.abc import Callable
from itertools import pairwise

import pytest

from tests.builders.changed import changed
from tests.html import Reader
from tests.report.builder import (
    CHARTS,
    HOSTILE,
    IMAGE,
    MARKUP,
    SCRIPT,
    compared_report,
    crowded_report,
    detailed_report,
    image_report,
    page_link,
    passed_report,
)
from vllm_qualify.evidence.idle import Idle
from vllm_qualify.evidence.sequential import Levels
from vllm_qualify.judge.verdict import Judgement
from vllm_qualify.recipe.searches import Fit, Sweep
from vllm_qualify.report.details import Details
from vllm_qualify.report.model import Report, read_report
from vllm_qualify.report.page import TITLES, render_page

UNLINKABLE = ("javascript:alert(1)", " javascript:alert(1)", "JavaScript:alert(1)", "data:text/html,x", "http://[", "")
MOST_BYTES = 2_000_000


# --- the text of the page


@pytest.mark.parametrize(
    ("name", "scripts"), [("hostile_page", 1), ("image_page", 1), ("detailed_page", 1), ("compared_page", 21)]
)
def test_outside_text_stays_text(name: str, scripts: int, request: pytest.FixtureRequest) -> None:
    page = request.getfixturevalue(name)
    read = Reader(page)
    hostile = {"script", "img", "iframe", "object", "embed", "red", "cudatools@nvidia.com"}
    assert not hostile & {tag for tag, _ in read.elements}
    assert not [name for _, attributes in read.elements for name in attributes if name.startswith("on")]
    assert [missing for missing in HOSTILE if missing not in read.text] == []
    assert read.text.count(SCRIPT) >= scripts
    assert "\x1b" not in page
    assert "\u202e" not in page


def test_the_page_is_complete_in_itself(hostile_page: str) -> None:
    read = Reader(hostile_page)
    assert read.having("src") == []
    assert all(address.startswith(("#", "evidence/", "report.json", "data:,", "data-docs/")) for address in read.having("href"))
    assert "url(" not in hostile_page
    assert "@import" not in hostile_page


def test_the_page_tells_everything_of_the_report(not_approved: Report, hostile_page: str) -> None:
    text = Reader(hostile_page).text
    release = not_approved.plan.cell.release
    expected = [
        *(not_approved.plan.cell.id, not_approved.run_id, str(not_approved.rejudged_from)),
        *(release.engine.version, release.engine.digest, release.model, release.revision),
        *(gate.because for gate in not_approved.judgement.gates if gate.verdict == "fail"),
        *(text for file in not_approved.files for text in (file.path, file.sha256)),
        *(row.metric for stage in not_approved.stages for row in stage.measurements),
    ]
    assert [missing for missing in expected if missing not in text] == []


def test_an_image_is_reported_with_its_digest_platform_and_labels(image_page: str) -> None:
    plan = image_report().plan
    read = Reader(image_page)
    for engine in (plan.cell.release.engine, plan.client):
        assert engine is not None
        assert engine.image is not None
        about = engine.image
        expected = [about.reference, engine.digest, about.platform, about.image_id, about.created, engine.version]
        assert [missing for missing in expected if missing not in read.text] == []
        assert [name for name in about.labels if f"label {name}" not in read.text] == []


def test_tables_have_captions_and_scopes(hostile_page: str) -> None:
    tags = [tag for tag, _ in Reader(hostile_page).elements]
    assert tags.count("table") == tags.count("caption") > 8
    assert all("scope" in attributes for tag, attributes in Reader(hostile_page).elements if tag == "th")
    assert [tags.count(landmark) for landmark in ("header", "nav", "main", "footer", "h1")] == [1] * 5


@pytest.mark.parametrize("address", UNLINKABLE)
def test_an_address_that_is_no_file_is_not_linked(approved: Report, address: str) -> None:
    addresses = Reader(render_page(approved, lambda _: address)).having("href")
    assert all(address.startswith(("#", "report.json", "data:,", "data-docs/")) for address in addresses)


def test_addresses_of_a_store_are_linked(approved: Report) -> None:
    addresses = Reader(render_page(approved, lambda file: f"../../evidence/{file.sha256}/x?a=1&b=2")).having("href")
    assert f"../../evidence/{approved.files[0].sha256}/x?a=1&b=2" in addresses


TOLD = {
    "hostile_page": [
        *("NOT PASSED", "NVIDIA H200", "2026-03-14 10:40:53 UTC", "gpu-memory-utilization", "VLLM_LOGGING_LEVEL"),
        *("16 min 23 s", "evaluated expectations"),
        f"--note '{SCRIPT}' '{MARKUP}'",
        f"--model '{IMAGE}' --dataset-name random",
    ],
    "image_page": [
        *("Image under test", "Image of the load client", f"label maintainer{IMAGE}", "<cudatools@nvidia.com>"),
        f"--launcher docker --image registry.example:5000/vllm/vllm-openai@{image_report().plan.cell.release.engine.digest}",
    ],
    "detailed_page": [
        "The SLO: ttft_p99_ms ≤\u00a02,000 ms.",
        "32 clients met the SLO, 34 missed it",
        f"2 runs were invalid: {SCRIPT}{MARKUP}",
        f"not on the curve: 96 clients: {MARKUP}{SCRIPT}",
        f"12 preemptions {SCRIPT} {IMAGE}",
        *("7.25 req/s", "3,600 tok/s", "80.00 tok/s"),
        "2 of 3 greedy texts are the same without it; they part: that of prompt 2 at character 41.",
        "91.00\u00a0% · 74.00\u00a0% · 56.40\u00a0%",
        f"the server drafted nothing {IMAGE}",
        *("1.315 ratio", "interval 1.21", f"without it: 3 failed {IMAGE}"),
        *("Cold: it compiled.", "48.5 s", f"no image was pulled {SCRIPT}"),
        *("GPU 0 idled", "20.37\u00a0%", "All of them together idled", "60.18\u00a0%"),
        "2 min 00 s of 2 min 23 s before the first completion, 31.2 s of 10 min 02 s after it",
        *("Chosen: max-num-seqs 310", f"out of memory {SCRIPT}", "312 req"),
        f"the power limit lowered the clocks {SCRIPT}",
        f"baseline: {IMAGE}",
        "running 63 to 64; waiting 0 to 37; samples that do not tell it all: 1 of 60",
        "12,000 tok/s to 12,006 tok/s",
    ],
    "compared_page": [
        "changed: engine, digest, hardware, load client, torch; settings: 4 added, 2 removed, 1 changed",
        "compilation-config.pass_config.fuse_allreduce_rms",
        *(f'"4 {SCRIPT}"', "driver 565.57.01", "2.12.1", "12,356 tok/s", "5.20 to 7.00\u00a0%"),
        f"--moe-backend is auto by default {SCRIPT}",
        f"VLLM_X is not known {IMAGE}",
        f"on gpu-7 {SCRIPT} by vllm-qualify 0.1.0",
        "Waiversoutput_throughput_tok_s against the baseline: waived until 2026-06-30 by release@example.org",
        "Diamonds are the baseline's",
        "Output tokens cost 0.1102 usd/Mtok: 2 times 2.5 usd an hour for 12,608 tok/s",
        "vllm-qualify run llama-3.1-8b --gpu-type h200 --variant fp8 --profile throughput --launcher process",
        "--baseline 20260201T101112Z-ba5e11 --price-usd-gpu-hour 2.5 --reuse none",
    ],
}


@pytest.mark.parametrize("name", TOLD)
def test_what_a_page_tells(name: str, request: pytest.FixtureRequest) -> None:
    text = Reader(request.getfixturevalue(name)).text
    assert [missing for missing in TOLD[name] if missing not in text] == []


NOTHING = Judgement(verdict="invalid", gates=[], levels=Levels(), suite={}, validation={})
UNSURE = Idle(held_s=60.0, gpus=[], because=f"GPU 0 is lost {SCRIPT}")


NO_PRICE = "Output tokens cost —: the price of a GPU hour is not given"
NO_IMAGE = ["Images", "Image under test", "platform", "image ID", "label ", "this stage is not in the report"]
EMPTY = ["NOT PASSED", "No gate was judged", "this stage is not in the report", "no stage left a file", "holds no statistics"]
UNREAD = ["no comparison of the settings", "configuration not known", "driver 565.57.01"]
MISSING: dict[str, tuple[Callable[[], Report], list[str], list[str]]] = {
    "image": (passed_report, ["from a local environment", NO_PRICE, "No gate of this cell is against a baseline"], NO_IMAGE),
    "client": (
        lambda: changed(image_report(), "plan", client=None, client_image=None),
        ["Image under test"],
        ["load client", "v0.31.0"],
    ),
    "everything": (lambda: changed(passed_report(), judgement=NOTHING, stages=[]), EMPTY, []),
    "idle": (lambda: changed(detailed_report(), "details", idle=UNSURE), ["The GPUs idled", f"GPU 0 is lost {SCRIPT}"], []),
    "curve": (lambda: changed(detailed_report(), "details.sweep", curve=[]), ["concurrency-8"], ["Each point is a number"]),
    "warned": (lambda: changed(compared_report(), "plan", warnings=[f"it {SCRIPT}"]), [f"Warning: it {SCRIPT}"], []),
    "before": (lambda: changed(passed_report(), "plan", establishes=True), ["This run becomes the baseline itself"], []),
    "its report": (lambda: changed(compared_report(), "details", before=None), UNREAD, []),
}


@pytest.mark.parametrize("case", MISSING)
def test_what_is_missing_is_said(case: str) -> None:
    make, told, untold = MISSING[case]
    read = Reader(render_page(make(), page_link))
    assert [text for text in told if text not in read.text] == []
    assert [text for text in untold if text in read.text] == []
    assert "script" not in {tag for tag, _ in read.elements}


# --- its details


def test_sections_are_there_only_for_what_there_is(detailed_page: str, approved_page: str) -> None:
    ids, none = (Reader(page).having("id") for page in (detailed_page, approved_page))
    assert [name for name in TITLES if ids.count(name) != 1] == []
    assert set(TITLES) & set(none) == set()
    assert set(ids) - set(none) == {*TITLES, "measured-5", "measured-6", "measured-7"}
    for name in Details.model_fields:
        # The paths that were taken, with their verdicts, are known from the measurements, too.
        if name in TITLES and name != "paths":
            page = render_page(changed(detailed_report(), "details", **{name: None}), page_link)
            assert set(TITLES) - set(Reader(page).having("id")) == {name}


def test_drawings_bring_nothing_along_and_have_a_text(detailed_page: str) -> None:
    read = Reader(detailed_page)
    drawings = [attributes for tag, attributes in read.elements if tag == "svg"]
    assert [drawing["role"] for drawing in drawings] == ["img"] * CHARTS
    assert all(drawing["aria-label"] for drawing in drawings)
    assert [tag for tag, _ in read.elements].count("figcaption") == CHARTS
    assert not {"xlink:href", "src", "style"} & {name for _, attributes in read.elements for name in attributes}
    assert "url(" not in detailed_page
    assert ">12.01k</text>" in detailed_page
    assert ">tok/s</text>" in detailed_page


def test_the_curve_marks_its_front_its_clients_and_the_baselines_points(detailed_page: str, compared_page: str) -> None:
    curves = [
        page.split("Output tokens per second of a GPU over")[1].split("</svg>")[0] for page in (detailed_page, compared_page)
    ]
    svg = curves[0]
    dots = [attributes for tag, attributes in Reader(svg).elements if tag == "circle"]
    assert [dot.get("fill") for dot in dots] == ["currentColor", "currentColor", None]
    # The point of the most output lies at the top, and the fastest one at the right.
    highest, fastest = min(dots, key=lambda dot: float(dot["cy"] or 0)), max(dots, key=lambda dot: float(dot["cx"] or 0))
    assert (dots.index(highest), dots.index(fastest)) == (1, 0)
    assert [f">{clients}</text>" in svg for clients in (8, 32, 64)] == [True] * 3
    assert [curve.count("l5 5l-5 5l-5 -5z") for curve in curves] == [0, 2]


def test_an_invalid_run_has_no_figures(detailed_page: str) -> None:
    row = detailed_page[detailed_page.index("<code>rate-7.25</code>") :].split("</tr>")[0]
    assert row.count("(none: see the note)") == 3
    assert "<strong>invalid:</strong>" in row


def test_stages_are_missed_only_where_they_were_asked_for(approved: Report) -> None:
    """Those of plain reports, none of which lacks one, are in `test_what_is_missing_is_said`."""
    asked = {"sweep": Sweep(concurrencies=[1]), "fit": Fit(max_num_seqs=True)}
    drafted = detailed_report()
    undrafted = [stage for stage in drafted.stages if stage.stage != "speculation"]
    missed = {("Fit", "Sweep"): changed(approved, "plan", **asked), ("Speculation",): changed(drafted, stages=undrafted)}
    for titles, report in missed.items():
        parts = render_page(report, page_link).split("this stage is not in the report")[:-1]
        assert tuple(part.rsplit("<h3>", 1)[1].split("</h3>")[0] for part in parts) == titles


@pytest.mark.parametrize("name", ["approved_page", "hostile_page", "compared_page"])
def test_references_lead_to_one_element_each(name: str, request: pytest.FixtureRequest) -> None:
    read = Reader(request.getfixturevalue(name))
    ids = read.having("id")
    assert len(ids) == len(set(ids))
    inside = [address[1:] for address in read.having("href") if address.startswith("#")]
    assert {*inside, *read.having("aria-labelledby")} <= set(ids)


def test_headings_do_not_skip_a_level(compared_page: str) -> None:
    levels = [int(tag[1]) for tag, _ in Reader(compared_page).elements if tag in ("h1", "h2", "h3", "h4", "h5")]
    assert levels[0] == 1
    assert all(after - before <= 1 for before, after in pairwise(levels))


def test_a_crowded_page_is_below_two_megabytes() -> None:
    report = crowded_report()
    assert len(render_page(report, page_link).encode()) < MOST_BYTES
    assert len(report.model_dump_json(indent=2).encode()) < MOST_BYTES
    assert read_report(report.model_dump_json(), "here") == report


def test_colours_can_be_read_in_light_and_dark(approved_page: str) -> None:
    roots = re.findall(r":root \{(.*?)\}", approved_page, re.DOTALL)
    assert len(roots) == 2
    for root in roots:
        colours = dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6})", root))
        for name in ("ink", "soft", "link", "pass", "fail", "inconclusive", "invalid"):
            for ground in ("paper", "panel"):
                assert _contrast(colours[name], colours[ground]) >= 4.5, (name, ground)


def _contrast(one: str, other: str) -> float:
    """As WCAG 2 defines it."""
    light, dark = sorted((_luminance(one), _luminance(other)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


def _luminance(colour: str) -> float:
    shares = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    linear = [share / 12.92 if share <= 0.03928 else ((share + 0.055) / 1.055) ** 2.4 for share in shares]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
