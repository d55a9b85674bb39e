"""Gates that are added to a recipe's file: nothing else of it changes, and it is never half-written."""

import os
import shutil
from pathlib import Path

import pytest
from ruamel.yaml import YAML

from vllm_qualify.errors import CallerError, HostError
from vllm_qualify.recipe.editing import Edit, NewGate, add_gates, find_file, write_edit
from vllm_qualify.recipe.gates import gate_of
from vllm_qualify.recipe.loading import catalog_folder, catalog_names, load_recipe

OF_ANSWERS = NewGate(gate_of(metric="truncated_answers", task="gsm8k", maximum=0.02, unit="fraction"), "run 1: 0.4 %")
OF_LOAD = NewGate(gate_of(metric="ttft_p90_ms", maximum=400.0, unit="ms"), "run 1: 310 ms")
FLOW_GATES = "        gates: [{metric: ttft_p50_ms, maximum: 30000, unit: ms}] # one line\n"


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    (tmp_path / "reference").symlink_to(catalog_folder() / "reference")
    return Path(shutil.copy(catalog_folder() / "reference.yaml", tmp_path / "mine.yaml"))


def lines_added(edit: Edit) -> list[str]:
    """The lines of the new text that the old one does not have. No line of the old one may be gone."""
    lines = edit.diff.splitlines()[2:]
    assert not [line for line in lines if line.startswith("-")]
    return [line[1:] for line in lines if line.startswith("+")]


def test_only_lines_with_the_gates_are_added_each_with_its_comment(recipe: Path) -> None:
    edit = add_gates(recipe, "cpu", "balanced", [OF_ANSWERS, OF_LOAD])
    assert [line.split(" # ")[0] for line in lines_added(edit)] == [
        "          - {metric: ttft_p90_ms, maximum: 400, unit: ms}",
        "  - {metric: truncated_answers, maximum: 0.02, unit: fraction}",
    ]
    assert "# run 1: 310 ms" in edit.after
    assert recipe.read_text() == edit.before
    write_edit(edit)
    written = load_recipe(str(recipe)).recipe
    assert OF_LOAD.gate in written.gpu_types["cpu"].profiles["balanced"].gates
    assert [path.name for path in sorted(recipe.parent.iterdir())] == ["mine.yaml", "reference"]


@pytest.mark.parametrize("name", catalog_names())
def test_of_each_recipe_of_the_catalog_nothing_else_changes(name: str, tmp_path: Path) -> None:
    """They have comments of every kind. Some have several tasks, and then a gate names its own."""
    for folder in (each for each in catalog_folder().iterdir() if each.is_dir()):
        (tmp_path / folder.name).symlink_to(folder)
    path = Path(shutil.copy(catalog_folder() / f"{name}.yaml", tmp_path))
    loaded = load_recipe(str(path)).recipe
    gpu_type = next(iter(loaded.gpu_types))
    profile, task = next(iter(loaded.gpu_types[gpu_type].profiles)), loaded.accuracy[0].task
    gate = gate_of(metric="looping_answers", task=task, maximum=0.02, unit="fraction")
    added = lines_added(add_gates(path, gpu_type, profile, [NewGate(gate, "run 1: 0 %")]))
    assert len(added) == 1


def test_a_profile_without_gates_gets_them(recipe: Path) -> None:
    text = recipe.read_text()
    start = text.index("        # Generous bounds")
    recipe.write_text(text[:start] + text[text.index("\nsmoke:") :])
    added = lines_added(add_gates(recipe, "cpu", "balanced", [OF_LOAD]))
    assert added[0] == "        gates:"
    assert added[1].startswith("          - {metric: ttft_p90_ms, maximum: 400, unit: ms}")


def test_a_list_in_one_line_is_left_to_the_user(recipe: Path) -> None:
    text = recipe.read_text()
    start = text.index("        gates:\n          - {metric: output_throughput")
    recipe.write_text(text[:start] + FLOW_GATES + text[text.index("\nsmoke:") :])
    with pytest.raises(CallerError, match=r"gpu_types\.cpu\.profiles\.balanced\.gates is no list with a line for each gate"):
        add_gates(recipe, "cpu", "balanced", [OF_LOAD])


@pytest.mark.parametrize("offset", [0, 2])
def test_gates_over_several_lines_and_no_line_end_at_the_end(recipe: Path, offset: int) -> None:
    yaml, document = YAML(), YAML(typ="safe").load(recipe.read_text())
    yaml.indent(mapping=2, sequence=offset + 2, offset=offset)
    yaml.dump({"gates": document.pop("gates"), **document}, recipe)
    text = recipe.read_text().rstrip()
    recipe.write_text(text)
    edit = add_gates(recipe, "cpu", "balanced", [OF_ANSWERS, OF_LOAD])
    added = [line for line in edit.diff.splitlines()[2:] if line.startswith("+") and "run 1" in line]
    assert [len(line) - len(line[1:].lstrip()) - 1 for line in added] == [offset, 8 + offset]


def test_gates_that_profiles_share_are_not_written(recipe: Path) -> None:
    """The attack on a neighbour: by an anchor the gate would be in each profile that refers to it."""
    text = (
        recipe.read_text()
        .replace("      balanced:\n", "      balanced: &shared\n")
        .replace("\nsmoke:", "      other: *shared\n\nsmoke:")
    )
    recipe.write_text(text)
    with pytest.raises(CallerError, match="more than this cell's gates would change"):
        add_gates(recipe, "cpu", "balanced", [OF_LOAD])
    assert recipe.read_text() == text


def test_a_gate_that_the_recipe_cannot_have_beside_its_own_is_refused(recipe: Path) -> None:
    double = NewGate(gate_of(metric="ttft_p50_ms", maximum=400.0, unit="ms"), "")
    with pytest.raises(CallerError, match="with these gates it would be no recipe") as refused:
        add_gates(recipe, "cpu", "balanced", [double])
    assert refused.value.place == str(recipe)
    assert [path.name for path in sorted(recipe.parent.iterdir())] == ["mine.yaml", "reference"]


def test_what_was_changed_meanwhile_is_not_overwritten(recipe: Path) -> None:
    edit = add_gates(recipe, "cpu", "balanced", [OF_LOAD])
    recipe.write_text(f"{edit.before}# mine\n")
    with pytest.raises(CallerError, match="changed meanwhile"):
        write_edit(edit)
    assert recipe.read_text().endswith("# mine\n")


def test_a_link_stays_one_and_the_permissions_stay(recipe: Path, tmp_path: Path) -> None:
    recipe.chmod(0o640)
    link = tmp_path / "link.yaml"
    link.symlink_to(recipe)
    write_edit(add_gates(link, "cpu", "balanced", [OF_LOAD]))
    assert link.is_symlink()
    assert "ttft_p90_ms" in recipe.read_text()
    assert recipe.stat().st_mode & 0o777 == 0o640


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_that_cannot_be_written_is_told(recipe: Path) -> None:
    recipe.parent.chmod(0o500)
    with pytest.raises(HostError):
        add_gates(recipe, "cpu", "balanced", [OF_LOAD])


@pytest.mark.parametrize("name", ["reference", str(catalog_folder() / "reference.yaml")])
def test_a_recipe_of_the_catalog_is_not_written_to(name: str) -> None:
    with pytest.raises(CallerError, match="reference is a recipe of the catalog") as refused:
        find_file(name)
    assert "cp " in refused.value.remedy


def test_a_file_that_is_not_there_is_told() -> None:
    with pytest.raises(CallerError, match="there is no recipe"):
        find_file("./nowhere.yaml")
