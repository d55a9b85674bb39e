"""A file of evidence has a name that a store takes as a part of a key."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from vllm_qualify.evidence.measurement import EvidenceFile
from vllm_qualify.publish.bundle import evidence_key
from vllm_qualify.publish.store import key_problem

SHA = "0" * 64


@given(st.text(min_size=1, max_size=8) | st.text("abZ09_@+=~.,:-/", min_size=1, max_size=8))
def test_each_name_that_is_taken_makes_a_key(path: str) -> None:
    try:
        file = EvidenceFile(path=path, sha256=SHA, size=1)
    except ValidationError:
        return
    assert key_problem(evidence_key(file)) == ""


@pytest.mark.parametrize("name", ["replies.json", "samples_gsm8k_2026-03-14T09-40-53.123456.jsonl", "a" * 255, "_@+=~.,:-"])
def test_the_names_of_tools_are_taken(name: str) -> None:
    assert key_problem(evidence_key(EvidenceFile(path=f"accuracy/{name}", sha256=SHA, size=1))) == ""
