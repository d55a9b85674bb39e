"""What a real engine's log says of the model that it serves."""

from pathlib import Path
from typing import Any

from vllm_qualify.engine.environment import EngineEnvironment
from vllm_qualify.engine.server import ServerPlan

CAPTURED = Path(__file__).parents[1] / "engine" / "captured"


def captured(name: str = "killed-engine.log") -> str:
    return (CAPTURED / name).read_text()


def plan_of(**others: Any) -> ServerPlan:
    settings: dict[str, Any] = {"model": "/models/tiny", "revision": None, "arguments": {}, "environment": {}} | others
    engine = EngineEnvironment(python=Path("/no/such/python"))
    return ServerPlan(engine=engine, served_model_name="tiny", startup_timeout_s=1, **settings)
