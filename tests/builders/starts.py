"""What further starts of a server left."""

import json
from pathlib import Path

from tests.lm_eval_files import Asked


def ask_once(asked: Asked) -> Asked:
    """The task as a further start asks it: once, and all questions together."""
    return asked._replace(task=asked.task.model_copy(update={"repetitions": 1, "sequential": False}))


def record_repeat(folder: Path, repeat: int, seconds: float) -> None:
    """The client's record of a repeat that took so long."""
    fields = {"cpu_s": [[1000.0, 0.0], [1000.0 + seconds, 1.0]], "max_rss_mib": 100}
    (folder / f"client-{repeat}.json").write_text(json.dumps(fields))
