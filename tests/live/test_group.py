"""Groups of tasks on the real engine, of sums and of calls of tools: the pooled score of each is judged by one gate."""

import json
from pathlib import Path

import pytest
from ruamel.yaml import YAML

from tests.builders.chat_model import MODEL, recipe
from tests.live.tool_questions import DRAWN, questions
from tests.qualified import COMMAND, furnished, of, run
from tests.recipes import Document, write
from vllm_qualify.engine.environment import EngineEnvironment
from vllm_qualify.recipe.loading import catalog_folder
from vllm_qualify.report.model import Report, load_report

pytestmark = pytest.mark.engine
SIZES = {"kept": 30, "paid": 50, "shared": 20}
TOOLS_OF_A_KIND = 12
MEMBER = """\
task: {name}
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: generate_until
doc_to_text: "Question: {{{{question}}}}\\nAnswer:"
doc_to_target: "{{{{answer.split('####')[-1].strip()}}}}"
metric_list: [{{metric: exact_match}}]
filter_list:
  - name: strict-match
    filter: [{{function: regex, regex_pattern: "#### (-?[0-9]+)"}}, {{function: take_first}}]
generation_kwargs: {{until: ["Question:"], temperature: 0.0}}
"""


def tasks(folder: Path) -> Path:
    folder.mkdir()
    lines = (catalog_folder() / "reference" / "test.jsonl").read_text().splitlines(keepends=True)
    for name, size in SIZES.items():
        data = folder / f"{name}.jsonl"
        data.write_text("".join(lines[:size]))
        del lines[:size]
        (folder / f"{name}.yaml").write_text(MEMBER.format(name=name, data=data))
    (folder / "sums.yaml").write_text(json.dumps({"group": "sums", "task": list(SIZES)}))
    return folder


def calls(folder: Path) -> Document:
    data = folder / "tools.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in questions(TOOLS_OF_A_KIND)))
    asked = {"num_questions": TOOLS_OF_A_KIND * len(DRAWN), "max_gen_toks": 256, "questions": {"test": str(data)}}
    asked["sequential"] = False  # else the task may end before each member was asked
    return {"preset": "tools"} | asked


def test_groups_pass_one_gate_each_on_their_pooled_scores(
    engine: EngineEnvironment, on_a_server: dict[str, str], tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("group")
    (folder / "home").mkdir()
    document: Document = YAML(typ="safe").load(recipe(folder, MODEL, {}).read_text())
    serving = document["gpu_types"]["cpu"]
    chats = serving["profiles"]["chats"]
    chats["load"] |= {"num_prompts": 32, "repeats": 1, "most_repeats": 1}
    chats["paths"] = False
    serving["profiles"] = {"chats": chats | {"gates": []}}
    for name in ("capabilities", "aliases"):
        del document[name]
    document["accuracy"] = [
        {
            "task": "sums",
            "api": "chat",
            "num_fewshot": 0,
            "num_questions": sum(SIZES.values()),
            "sequential": False,
            "task_folder": str(tasks(folder / "own")),
        },
        calls(folder),
    ]
    document["gates"] = [
        {"metric": "exact_match", "task": "sums", "filter": "strict-match", "minimum": 0.8, "unit": "fraction"},
        {"metric": "acc", "task": "bfcl", "filter": "ast", "minimum": 0.6, "unit": "fraction"},
    ]
    home, path = furnished(folder / "home", tmp_path_factory), str(write(document, folder / "group.yaml"))
    done = run(home, COMMAND, "run", path, "--allow-code", **of(engine), **on_a_server)
    assert done.returncode == 0, done.stdout + done.stderr
    (report,) = [load_report(each) for each in (home / "runs").iterdir()]
    assert_pooled(report, "exact_match", "sums", sorted(SIZES))
    assert_pooled(report, "acc", "bfcl", sorted(f"bfcl_{kind}" for kind in DRAWN))


def assert_pooled(report: Report, metric: str, task: str, members: list[str]) -> None:
    (gate,) = (each for each in report.judgement.gates if each.gate.metric == metric)
    assert (gate.gate.task, gate.verdict) == (task, "pass")
    (scored,) = (each for each in report.details.questions if each.task == task)
    assert scored.topics == members
    asked = [score for score in scored.ours if score is not None]
    (accuracy,) = (each for each in report.stages if each.stage == "accuracy")
    (score,) = (each for each in accuracy.measurements if (each.metric, each.task) == (metric, task))
    assert score.value == pytest.approx(sum(asked) / len(asked))
    assert score.sample_count == len(asked)
