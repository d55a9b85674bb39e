"""The captured files of two servers, one with speculative decoding and one without, and the load that they ran."""

from tests.builders.loads import CAPTURED_FOLDER
from vllm_qualify.recipe.load import Load

CAPTURED = CAPTURED_FOLDER / "speculation"
SETTINGS = Load(
    input_len=16, output_len=8, max_concurrency=4, num_prompts=40, num_warmups=4, repeats=2, most_repeats=2, min_duration_s=0.01
)
