"""Who may decide: a file of names with the hashes of their keys."""

import base64
import json
from pathlib import Path

import pytest

from vllm_qualify.approver.people import add_person, person, read_people
from vllm_qualify.errors import CallerError


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "approvers.json"


def basic(text: str) -> str:
    return f"Basic {base64.b64encode(text.encode()).decode()}"


def test_a_person_logs_in_with_a_key_that_is_not_in_the_file(file: Path) -> None:
    key = add_person(file, "Ada Lovelace")
    assert person(read_people(file), basic(f"Ada Lovelace:{key}")) == "Ada Lovelace"
    assert key not in file.read_text()
    assert len(json.loads(file.read_text())["Ada Lovelace"]) == 64
    assert file.stat().st_mode & 0o777 == 0o600


def test_a_new_key_ends_the_old_one_and_leaves_the_others(file: Path) -> None:
    bobs, old = add_person(file, "Bob"), add_person(file, "Ada")
    new = add_person(file, "Ada")
    people = read_people(file)
    assert [person(people, basic(each)) for each in (f"Ada:{old}", f"Ada:{new}", f"Bob:{bobs}")] == [None, "Ada", "Bob"]


@pytest.mark.parametrize(
    "header",
    ["", "Basic", "Basic !!", "Bearer QWRhOmtleQ==", basic("Ada"), basic("Ada:"), basic(":"), basic("Eve:KEY"), "Basic /w=="],
)
def test_nobody_else_logs_in(file: Path, header: str) -> None:
    key = add_person(file, "Ada")
    people = read_people(file)
    assert person(people, header.replace("KEY", key)) is None
    assert person(people, basic(f"Bob:{key}")) is None
    assert person(people, basic(f"Ada:{people['Ada']}")) is None, "the hash is not the key"


@pytest.mark.parametrize("name", ["recipe", "Ada: the first", "", " ", "A\u202eda"])
def test_a_name_that_cannot_be_kept_is_refused(file: Path, name: str) -> None:
    with pytest.raises(CallerError):
        add_person(file, name)
    assert not file.exists()


@pytest.mark.parametrize("body", ["", "[]", '{"Ada": "key"}', json.dumps({"recipe": 64 * "0"}), '{"Ada": null}'])
def test_what_is_not_a_file_of_approvers_is_reported(file: Path, body: str) -> None:
    file.write_text(body)
    with pytest.raises(CallerError):
        read_people(file)


def test_a_file_that_is_not_there_or_that_everybody_may_write_is_refused(file: Path) -> None:
    with pytest.raises(CallerError, match="approver key NAME"):
        read_people(file)
    add_person(file, "Eve")
    file.chmod(0o606)
    with pytest.raises(CallerError, match="every user"):
        read_people(file)
