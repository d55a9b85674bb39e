"""Presets of accuracy tasks: what they stand for, and that lm-eval has their tasks in the form that they are asked in."""

import re
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError
from ruamel.yaml import YAML

from tests.recipes import Document, loaded_reference, write
from vllm_qualify.errors import QualifyError
from vllm_qualify.recipe.loading import load_recipe
from vllm_qualify.recipe.presets import PRESETS
from vllm_qualify.recipe.workload import Accuracy

# How many questions the data of each task has, by its card on the hub.
QUESTIONS = {
    "gsm8k": 1319,
    "mmlu": 14042,
    "gsm8k_platinum": 1209,
    "mmlu_pro": 12032,
    "ifeval": 541,
    "aime25": 30,
    "gpqa_diamond_cot_zeroshot": 198,
}
PAGE = Path(__file__).parents[2] / "docs" / "accuracy.md"
