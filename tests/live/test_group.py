"""A group of three tasks on the real engine: its pooled score is judged by one gate."""

import json
from pathlib import Path

import pytest
from ruamel.yaml import YAML

from tests.live.test_chat_model import MODEL, recipe
from tests.qualified import COMMAND, furnished, run
from tests.recipes import Document, write
from vllm_qualify.engine.environment import EngineEnvironment
from vllm_qualify.recipe.loading import catalog_folder
from vllm_qualify.report.model import load_report

pytestmark = pytest.mark.engine
SIZES = {"kept": 30, "paid": 50, "shared": 20}
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


def test_a_group_of_three_tasks_passes_one_gate_on_its_pooled_score(
    engine: EngineEnvironment, on_a_server: dict[str, str], tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("group")
    (folder / "home").mkdir()
    document: Document = YAML(typ="safe").load(recipe(folder, MODEL, {}).read_text())
    serving = document["gpu_types"]["cpu"]
    chats = serving["profiles"]["chats"]
    chats["load"] |= {"num_prompts": 32, "repeats": 1, "most_repeats": 1}
    serving["profiles"] = {"chats": chats | {"gates": []}}
    for name in ("capabilities", "aliases"):
        del document[name]
    document["accuracy"] = [
        {
            "task": "sums",
            "api": "chat",
            "num_fewshot": 0,
            "num_questions": sum(SIZES.values()),
            "task_folder": str(tasks(folder / "own")),
        }
    ]
    document["gates"] = [
        {"metric": "exact_match", "task": "sums", "filter": "strict-match", "minimum": 0.8, "unit": "fraction"}
    ]
    home, path = furnished(folder / "home", tmp_path_factory), str(write(document, folder / "group.yaml"))
    environment = {"VLLM_QUALIFY_ENGINE": str(engine.python.parents[1])} | on_a_server
    done = run(home, COMMAND, "run", path, "--allow-code", **environment)
    assert done.returncode == 0, done.stdout + done.stderr
    (report,) = [load_report(each) for each in (home / "runs").iterdir()]
    (gate,) = (each for each in report.judgement.gates if each.gate.metric == "exact_match")
    assert (gate.gate.task, gate.verdict) == ("sums", "pass")
    (scored,) = report.details.questions
    assert scored.topics == sorted(SIZES)
    asked = [score for score in scored.ours if score is not None]
    (accuracy,) = (each for each in report.stages if each.stage == "accuracy")
    (score,) = (each for each in accuracy.measurements if each.metric == "exact_match")
    assert score.value == pytest.approx(sum(asked) / len(asked))
    assert score.sample_count == len(asked)
