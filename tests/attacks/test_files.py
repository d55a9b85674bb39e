"""Files that never end, that are short and mean a billion values, or that talk to the terminal."""

import os
from pathlib import Path

import pytest

from vllm_qualify.approval.signing import new_key, public_keys
from vllm_qualify.approval.verify import verify_file
from vllm_qualify.cli.words import tell
from vllm_qualify.errors import CallerError, StoreError
from vllm_qualify.publish.stores import open_store
from vllm_qualify.recipe.importing.documents import read_yaml
from vllm_qualify.recipe.loading import load_recipe

LEVELS = 9
BOMB = "a0: &a0 [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"a{level}: &a{level} [{', '.join([f'*a{level - 1}'] * 9)}]\n" for level in range(1, LEVELS)
)


@pytest.mark.parametrize(
    ("text", "message"),
    [(BOMB, "more than 200,000 values"), ("a: &a [*a]\n", "contains itself"), ("a: " + "x" * 5_000_000, "characters")],
    ids=["bomb", "circle", "long"],
)
def test_a_short_recipe_that_means_very_much_is_refused(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "bomb.yaml"
    path.write_text(text)
    with pytest.raises(CallerError, match=message):
        load_recipe(str(path))
    with pytest.raises(CallerError, match=message):
        read_yaml(path)


@pytest.fixture(params=["pipe", "device"])
def endless(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    path = tmp_path / "store" / "a" / "b"
    path.parent.mkdir(parents=True)
    if request.param == "pipe":
        os.mkfifo(path)
    else:
        path.symlink_to("/dev/zero")
    return path


def test_an_object_that_never_ends_is_refused(endless: Path) -> None:
    store = open_store(endless.parents[1].as_uri())
    with pytest.raises(StoreError, match="not a plain file"):
        store.get("a/b")


def test_an_approval_that_never_ends_is_refused(endless: Path, tmp_path: Path) -> None:
    new_key(tmp_path / "key.pem")
    with pytest.raises(CallerError, match="not a plain file"):
        verify_file(endless, public_keys([tmp_path / "key.pem.pub"]), None)  # type: ignore[arg-type]  # it does not come to the day


def test_codes_of_a_log_do_not_reach_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    tell("server starting: \x1b]52;c;ZXZpbA==\x07\x1b[2J\u202egnp.exe\x9b31m")
    message = capsys.readouterr().err
    assert message == "server starting: \\x1b]52;c;ZXZpbA==\\x07\\x1b[2J\\u202egnp.exe\\x9b31m\n"
