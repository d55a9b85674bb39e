"""A model, or its code, that knows when it is qualified: nothing of names, paths, headers or parents tells it.

The code of a model looks at what a served process sees, started by a run and by hand. A server notes what our requests have.
"""

import itertools
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from tests.attacks.hostile_driver import plan_in
from tests.builders.accuracy import asking, write_rows
from tests.builders.benches import client_of, nothing, silent
from tests.builders.plans import document_in, engine_in, plans_of
from tests.builders.processes import until
from tests.builders.worlds import world_of
from tests.ci import IN_CI
from tests.evidence.commands import SERVER
from tests.fakes.openai_server import Book, serving
from vllm_qualify.answers import ask_within
from vllm_qualify.engine.bench import results_folder, run_command, running_bench
from vllm_qualify.engine.confinement import confining_process
from vllm_qualify.engine.environment import EngineEnvironment
from vllm_qualify.engine.landlock import can_confine
from vllm_qualify.engine.process import running_guarded, wait_for
from vllm_qualify.engine.server import Server, ServerPlan, config_text
from vllm_qualify.engine.server_start import launch
from vllm_qualify.evidence.accuracy.samples import read_answers
from vllm_qualify.evidence.load.client import command_of
from vllm_qualify.evidence.paths.kinds import salts_of
from vllm_qualify.evidence.paths.replies import Prompt
from vllm_qualify.evidence.serving import Served
from vllm_qualify.evidence.smoke import drawn_prompt
from vllm_qualify.evidence.stages.smoke import SMOKE
from vllm_qualify.plan.cell import TaskPlan
from vllm_qualify.recipe.accuracy import Accuracy
from vllm_qualify.recipe.load import Load
from vllm_qualify.recipe.loading import catalog_folder
from vllm_qualify.recipe.sampling import Sampling

SEEN = Path(__file__).with_name("seen.txt")
NAMES_US = re.compile(r"qualif|lm.eval|\bvq-|prefect|\bGX_|great.expectations|guard\.py|\bbench|probe", re.IGNORECASE)
# Of the server of a run alone: where its home, its temporary folder and its caches are, and switches that any user may set.
MAY_DIFFER = {
    *("HOME", "TMPDIR", "HF_HOME", "HF_MODULES_CACHE", "HF_TOKEN_PATH", "HF_HUB_OFFLINE", "HF_HUB_DISABLE_TELEMETRY"),
    *("TORCHINDUCTOR_CACHE_DIR", "TORCHINDUCTOR_CPP_CACHE_PRECOMPILE_HEADERS"),
    *("DO_NOT_TRACK", "VLLM_DO_NOT_TRACK", "VLLM_NO_USAGE_STATS"),
}
LIMIT_S = 240.0

Saw = dict[str, Any]


# --- what a served process sees


def make_model(folder: Path) -> None:
    """The reference model with code that looks around as soon as its configuration is read."""
    model = shutil.copytree(catalog_folder() / "reference" / "model", folder / "model")
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"auto_map": {"AutoConfig": "own.OwnConfig"}}))
    configuration = "from transformers import LlamaConfig\n\ntell()\n\n\nclass OwnConfig(LlamaConfig):\n    pass\n"
    (model / "own.py").write_text(f"{SEEN.read_text()}\n\n{configuration}")


def read_sights(log: Path) -> list[Saw]:
    return [json.loads(told) for told in re.findall(r"saw: (\{.*\})\n", log.read_text())]


def await_sight(log: Path) -> list[Saw]:
    assert until(lambda: read_sights(log) != [], LIMIT_S), log.read_text()[-4000:]
    return read_sights(log)


def serve_by_hand(plan: ServerPlan, engine: EngineEnvironment, folder: Path) -> list[Saw]:
    """What the code sees in a plain `vllm serve`."""
    (folder / "server.yaml").write_text(config_text(plan, 1))
    environment = {name: value for name, value in os.environ.items() if not name.startswith("VLLM_QUALIFY_")}
    log, command = folder / "log", [str(engine.vllm), "serve", "--config", str(folder / "server.yaml")]
    with (
        log.open("w") as output,
        subprocess.Popen(
            command, env=environment | plan.environment, cwd=folder, stdout=output, stderr=output, start_new_session=True
        ) as process,
    ):
        try:
            return await_sight(log)
        finally:
            os.killpg(process.pid, 9)


def without_places(saw: Saw | list[str], places: Mapping[str, str]) -> str:
    """What was seen, as text, without the places that the user has chosen: of the engine, of the model, of temporary files."""
    text = json.dumps(saw)
    for place in sorted(places, key=len, reverse=True):
        text = text.replace(place, places[place])
    return text


@pytest.mark.engine
def test_the_code_of_a_model_sees_nothing_that_names_us(
    engine: EngineEnvironment, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not can_confine():
        (pytest.fail if IN_CI else pytest.skip)("this kernel has no Landlock of version 2")
    monkeypatch.delenv("PYTHONPATH", raising=False)
    run = tmp_path / ".vllm-qualify" / "runs" / "1" / "serve"
    run.mkdir(parents=True)
    # The orchestrator runs in its checkout.
    checkout = tmp_path / "vllm-qualify"
    checkout.mkdir()
    monkeypatch.chdir(checkout)
    make_model(tmp_path)
    plan = plan_in(tmp_path)
    with launch(plan, run) as starting:
        of_run = await_sight(starting.process.log)
    (tmp_path / "hand").mkdir()
    (by_hand, *_) = serve_by_hand(plan, engine, tmp_path / "hand")
    places = {str(engine.python.parents[1]): "ENGINE", str(tmp_path / "model"): "MODEL", tempfile.gettempdir(): "TMP"}
    # What is mounted where something is for both: pytest's own place of all of this is among them.
    for_both = {line.split()[1] for line in by_hand["mounts"]}
    mounted = [line for saw in of_run for line in saw.pop("mounts") if line.split()[1] not in for_both]
    assert NAMES_US.findall(without_places(mounted, places)) == []
    for saw in of_run:
        found = NAMES_US.findall(without_places(saw, places))
        assert found == [], json.dumps(saw, indent=2)
        assert saw["environment"].keys() - by_hand["environment"].keys() <= MAY_DIFFER
        assert all(saw["open"][stream].startswith("pipe:") for stream in "12"), saw["open"]
        for same in ("machine", "name", "group"):
            assert saw[same] == by_hand[same], same


LOOKS = """
import os
print(os.environ, os.getcwd(), *(os.readlink(f"/proc/self/fd/{stream}") for stream in (0, 1, 2)))
"""


@pytest.mark.parametrize("is_trusting", [False, True])
def test_no_confined_process_sees_a_name_of_ours(is_trusting: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where no engine is: a client and lm-eval are confined as a server is."""
    for name in ("vllm-qualify", "runs"):
        (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path / "vllm-qualify")
    monkeypatch.delenv("PYTHONPATH", raising=False)
    log = tmp_path / "vllm-qualify" / "log"
    with confining_process({}, readable=[Path(sys.prefix), Path(sys.base_prefix)], is_trusting=is_trusting) as confinement:
        command = [sys.executable, "-I", "-c", LOOKS]
        with running_guarded(command, confinement.environment, log, rules=confinement.rules) as process:
            wait_for(process, 60, lambda: None, "looking")
    seen = without_places({"seen": log.read_text()}, {tempfile.gettempdir(): "TMP", str(Path(sys.prefix).parent): "PYTHON"})
    assert "pipe:" in seen
    assert NAMES_US.findall(seen) == [], seen


# --- what our requests have


class Notes(ThreadingHTTPServer):
    """A server that streams two tokens to whoever asks, and notes all that it got."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), NotingHandler)
        self.got = list[dict[str, Any]]()


class NotingHandler(BaseHTTPRequestHandler):
    server: Notes

    def do_GET(self) -> None:
        self._note({})
        self.send_error(404)

    def do_POST(self) -> None:
        self._note(json.loads(self.rfile.read(int(self.headers.get("content-length") or 0)) or b"{}"))
        usage = {"prompt_tokens": 12, "completion_tokens": 2, "total_tokens": 14}
        chunks = [*({"choices": [{"index": 0, "text": text}]} for text in ("a", "b")), {"choices": [], "usage": usage}]
        body = "".join(f"data: {json.dumps(chunk)}\n\n" for chunk in chunks) + "data: [DONE]\n\n"
        self.send_response(200)
        self.send_header("content-type", "text/event-stream")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body.encode())

    def _note(self, body: dict[str, Any]) -> None:
        headers = {name.lower(): value for name, value in self.headers.items()}
        self.server.got.append({"headers": headers, "fields": {name: body[name] for name in body if name != "prompt"}})

    def log_message(self, *_: object) -> None:
        """Silent."""


@pytest.fixture
def notes() -> Iterator[Notes]:
    with Notes() as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()


def own_agent(notes: Notes) -> str:
    ask_within("POST", f"http://127.0.0.1:{notes.server_port}/v1/completions", 10, json={"prompt": "one"})
    return str(notes.got.pop()["headers"]["user-agent"])


@pytest.mark.engine
def test_the_requests_of_bench_do_not_say_whose_they_are(engine: EngineEnvironment, notes: Notes, tmp_path: Path) -> None:
    agent = own_agent(notes)
    load = Load(
        input_len=12, output_len=2, window="whole", max_concurrency=2, num_prompts=4, num_warmups=0, min_duration_s=0.01
    )
    client = client_of(engine, f"http://127.0.0.1:{notes.server_port}")
    with running_bench(client, tmp_path / "bench.log") as bench:
        command = command_of(client, "reference", load, results_folder(bench), 1)
        run_command(bench, command, "bench-1.json", tmp_path / "bench-1.log", LIMIT_S, nothing, silent)
    asked = [got for got in notes.got if got["fields"]]
    assert len(asked) >= 4
    assert {got["headers"]["user-agent"] for got in notes.got} == {agent}
    assert [got for got in notes.got if NAMES_US.search(json.dumps(got))] == []


@pytest.mark.parametrize("api", ["chat", "completions"])
def test_the_requests_of_lm_eval_do_not_say_whose_they_are(api: str, notes: Notes, tmp_path: Path) -> None:
    book, data = Book({f"What is {number}?": f"#### {number}" for number in range(4)}), tmp_path / "test.jsonl"
    write_rows(data, [{"question": question, "answer": answer} for question, answer in book.replies.items()])
    settings = Accuracy.model_validate({"api": api, "num_questions": 4, "num_fewshot": 0, "time_limit_s": 60.0})
    plan = TaskPlan(settings=settings, num_concurrent=4, questions=[data])
    with asking(book, plan, tmp_path / "accuracy" / "gsm8k") as run:
        run.ask(run.steps[0])
    assert len(book.requests) == 4
    agent = own_agent(notes)
    for headers in book.headers:
        assert headers["user-agent"] == agent
        assert "authorization" not in headers
        assert NAMES_US.search(json.dumps(headers)) is None


def test_the_salts_of_a_cache_do_not_say_which_path_they_are_of() -> None:
    """Beside, they stay apart: a prompt is cold where its salt was never sent."""
    prompts = [Prompt(0, "one"), Prompt(1, "two")]
    salts = [salt for path in ("cold", "hung up") for salt in salts_of("run", path, prompts)]
    sent = [Prompt(0, "one").request("reference", salt, 4)[1]["cache_salt"] for salt in salts]
    assert len(set(sent)) == len(set(salts)) == 4
    assert all(re.fullmatch("[0-9a-f]{32}", str(salt)) for salt in sent)


# --- what is drawn for each run


def test_each_run_has_an_order_of_its_own(tmp_path: Path) -> None:
    document, stand_in = document_in(tmp_path), engine_in(tmp_path)
    plans = [plan for _ in range(2) for plan in plans_of(document, stand_in)]
    orders = [task.order for plan in plans for task in plan.accuracy]
    assert all(re.fullmatch("[0-9a-f]{32}", order) for order in orders)
    assert len(set(orders)) == len(orders) > 1


def test_each_run_has_a_smoke_prompt_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And its smoke stage asks it."""
    monkeypatch.setattr(Server, "check_alive", lambda _: None)
    document, stand_in = document_in(tmp_path), engine_in(tmp_path)
    plans = [plan for _ in range(2) for plan in plans_of(document, stand_in)]
    assert all(re.fullmatch("[0-9a-f]{32}", plan.drawn) for plan in plans)
    prompts = [drawn_prompt(plan.drawn) for plan in plans]
    assert len(set(prompts)) == len(prompts) > 1
    for plan, prompt in zip(plans, prompts, strict=True):
        book = Book({})
        with serving(book) as url:
            served = Served(server=SERVER.model_copy(update={"url": url}))
            SMOKE.measure(world_of(served, plan, tmp_path), tmp_path)
        assert book.prompts == [plan.smoke.prompt] * 2 + [prompt] * 2


@pytest.fixture
def task(tmp_path: Path) -> TaskPlan:
    """Twelve questions that are equally long, so that lm-eval asks them in the order that it is given."""
    data = tmp_path / "test.jsonl"
    write_rows(data, [{"question": f"What is {number}?", "answer": f"#### {number}"} for number in range(10, 22)])
    changed: dict[str, Any] = {"num_questions": 12, "num_fewshot": 0, "time_limit_s": 60.0}
    settings = Accuracy(**changed, sampling=Sampling(temperature=1))
    return TaskPlan(settings=settings, num_concurrent=2, questions=[data])


def test_neither_order_nor_seeds_can_be_known_beforehand(task: TaskPlan, tmp_path: Path) -> None:
    """A model's code that has the public questions, and the recipe. The answers are those of the same questions."""
    answers = {f"What is {number}?": f"#### {number}" for number in range(10, 22)}
    sent: dict[str, tuple[list[str], list[int]]] = {}
    for order in ("", "a" * 32, "b" * 32):
        book, folder = Book(answers), tmp_path / (order[:1] or "usual") / "gsm8k"
        with asking(book, task.model_copy(update={"order": order}), folder) as run:
            run.ask(run.steps[0])
        # Whoever takes the answers over has an order of its own.
        answered = read_answers(folder, task.model_copy(update={"order": "c" * 32}))
        assert {answer.question for answer in answered.answers} == set(range(12))
        assert {tuple(answer.scores.values()) for answer in answered.answers} == {(1.0, 1.0)}
        assert json.loads((folder / "task.json").read_text())["order"] == order
        sent[order] = ([str(prompt) for prompt in book.prompts], [request["seed"] for request in book.requests])
    prompts, seeds = zip(*sent.values(), strict=True)
    assert len({frozenset(each) for each in prompts}) == 1
    # Two at once change places with their neighbours at most.
    places = [[each.index(prompt) for prompt in sorted(each)] for each in prompts]
    for one, other in itertools.combinations(places, 2):
        assert max(abs(a - b) for a, b in zip(one, other, strict=True)) > 3
    assert len({seed for each in seeds for seed in each}) == 36
