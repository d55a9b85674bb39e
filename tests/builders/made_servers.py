"""The plan of a server, of little more than its model and its options."""

from pathlib import Path

from vllm_qualify.engine.environment import EngineEnvironment
from vllm_qualify.engine.server import ServerPlan


def server_of(
    model: Path | str, arguments: dict[str, object] | None = None, kind: str = "vllm", revision: str | None = None
) -> ServerPlan:
    about = {"model": str(model), "served_model_name": "made", "environment": {}, "startup_timeout_s": 60, "kind": kind}
    engine = EngineEnvironment(python=Path("/env/bin/python")).model_dump()
    return ServerPlan.model_validate(about | {"engine": engine, "arguments": arguments or {}, "revision": revision})
