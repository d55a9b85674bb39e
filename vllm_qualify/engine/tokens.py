"""How many tokens texts have, by a model's tokenizer. The engine's Python has the library; this one need not."""

import json
import subprocess
from collections.abc import Sequence
from pathlib import Path

from vllm_qualify.engine.confinement import quiet_environment
from vllm_qualify.engine.environment import EngineEnvironment
from vllm_qualify.errors import CallerError
from vllm_qualify.secrets import redact

# Runs in the engine's Python. A file of a tokenizer is data: nothing of the model runs.
COUNT = """
import json, sys
from tokenizers import Tokenizer
tokenizer = Tokenizer.from_file(sys.argv[1])
tokenizer.no_truncation()
tokenizer.no_padding()
texts = json.load(sys.stdin)
found = tokenizer.encode_batch(texts, add_special_tokens=False)
json.dump([len(each.ids) for each in found], sys.stdout)
"""
TIME_LIMIT_S = 1800
REMEDY = "name a model's own tokenizer.json"


def count_tokens(engine: EngineEnvironment, tokenizer: Path, texts: Sequence[str]) -> list[int]:
    """The number of tokens of each text, without those that a tokenizer puts around texts.

    `tokenizer` is a file `tokenizer.json`, or the folder of a model that has one. Raises CallerError if there is no such file,
    or it is no tokenizer.
    """
    file = tokenizer / "tokenizer.json" if tokenizer.is_dir() else tokenizer
    if not file.is_file():
        raise CallerError(f"no tokenizer at {file}", "name a tokenizer.json, or the folder of a model with one", "--tokenizer")
    try:
        done = subprocess.run(
            [str(engine.python), "-I", "-c", COUNT, str(file)],
            input=json.dumps(list(texts)),
            capture_output=True,
            text=True,
            timeout=TIME_LIMIT_S,
            env=quiet_environment(),
            check=False,
        )
        counts = json.loads(done.stdout) if done.returncode == 0 else None
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        raise CallerError(f"the tokenizer at {file} does not work", REMEDY, "--tokenizer") from error
    if not isinstance(counts, list) or len(counts) != len(texts):
        said = redact(done.stderr).strip().splitlines()[-1:]
        raise CallerError(f"{file} is no tokenizer: {' '.join(said)[:200]}", REMEDY, "--tokenizer")
    return [int(count) for count in counts]
