"""Flow runs of a worker as forks of a process that has imported Prefect and the flows, which takes longer than these runs do.

Each is Prefect's own program with its own arguments and environment. The worker starts what stands for it, when Prefect has
prepared where it runs: see `tests.warm.engine`.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from tests.warm.forks import Forks, Warm, answering, write_stand_in

IMPORTS = (
    *("prefect.engine", "prefect.flow_engine", "flows.qualify", "flows.fleet", "tests.fleet.stubbed"),
    *("great_expectations.expectations", "scipy.stats", "pandas", "vllm_qualify.evidence.serving", "vllm_qualify.runs.judging"),
)
IDLE_S = 120
ENGINE = "prefect.engine"
# What Prefect's hooks are run by is no flow run.
BUT = f"""\
if arguments[:2] != ["-m", {ENGINE!r}]:
    os.execv({{python!r}}, [{{python!r}}, *arguments])"""


@contextmanager
def warm_flow_runs() -> Iterator[str]:
    """The command that starts a flow run, for a worker's job variables, during the block."""
    forks = Forks(Warm(sys.executable, IMPORTS, IDLE_S, ["tests.warm.lm_eval:use"]), _is_read)
    with TemporaryDirectory(prefix="vq-warm-") as folder:
        address, program = Path(folder) / "socket", Path(folder) / "python"
        write_stand_in(program, address, but=BUT.format(python=sys.executable))
        with answering(forks, address, lambda *_: None):
            yield f"{program} -m {ENGINE}"


def _is_read(name: str) -> bool:
    """Not what each flow run, or each host, has of its own."""
    return not name.startswith(("PREFECT__", "VLLM_", "PYTEST_", "TMPDIR", "COLUMNS", "LINES"))
