"""Messages of vLLM's packages: read from Python, C++ and shared objects, and told where nobody decided."""

import pytest

from infra.package_messages import Package, describe_package, merge_packages, read_files, split_packages

MADE = Package(r"^triton/", r"^triton/testing", r"\.so$")
PYTHON = b"""
raise RuntimeError("the made kernel is not supported on this GPU at all")
raise ValueError("short")
logger.error("what is only logged is not looked for")
"""
CUDA = b"""
TORCH_CHECK(rows == 2, "the made rows are supported on ", arch, " only" " and nowhere else");
FLASHINFER_CHECK(size % 8 == 0);
"""
OBJECT = b"\x00\x01The client socket has timed out after %d seconds\x00abc\x00A text that no family knows of any package\x00"


def test_what_a_start_runs_through_is_read_and_the_rest_is_counted() -> None:
    files = [
        ("triton/a.py", PYTHON),
        ("triton/testing.py", PYTHON),
        ("triton/a.cu", CUDA),
        ("triton/broken.py", b"{{ a }}  b c"),
    ]
    said, unread = read_files(MADE, [*files, ("other/a.py", PYTHON), ("triton/a.txt", PYTHON)])
    assert said == {
        ("triton/a.py", "RuntimeError", "the made kernel is not supported on this GPU at all"),
        ("triton/a.py", "ValueError", "short"),
        ("triton/a.cu", "TORCH_CHECK", "the made rows are supported on {} only and nowhere else"),
    }
    assert unread == 4


def test_of_a_shared_object_the_texts_are_read_that_a_family_knows() -> None:
    said, _ = read_files(MADE, [("torch/lib/made.so", OBJECT)])
    assert said == {("torch/native", "", "The client socket has timed out after {} seconds")}


@pytest.fixture
def said() -> set[tuple[str, str, str]]:
    return {
        ("triton/a.py", "RuntimeError", "the made kernel is not supported on this GPU at all"),
        ("triton/b.py", "RuntimeError", "the made kernel is not supported on this GPU at all"),
        ("nobody/a.py", "RuntimeError", "what nobody decided is not kept in the table"),
        ("cuda/cudaErrorNoDevice", "", "no CUDA-capable device is detected"),
    }


def test_a_text_with_one_decision_stands_once_and_what_is_not_decided_is_left_out(said: set[tuple[str, str, str]]) -> None:
    table = merge_packages({"triton==1": said})
    assert [each.place for each in table.statements] == ["cuda/cudaErrorNoDevice", "triton/a.py"]
    assert split_packages(table) == {"triton==1": {each[:3] for each in table.statements}}


def test_what_is_new_and_not_decided_is_told(said: set[tuple[str, str, str]]) -> None:
    reading = read_files(MADE, [])._replace(said=said, unread=7)
    assert list(describe_package("triton==1", reading, set())) == [
        "triton==1: 4 messages read, 3 of them decided; left out: 0 too short, 7 in modules that no server runs",
        "  new, not decided: nobody/a.py: RuntimeError: what nobody decided is not kept in the table",
    ]
    assert len(list(describe_package("triton==1", reading, said))) == 1
