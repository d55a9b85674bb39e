"""Plans of servers of the fake vLLM."""

from pathlib import Path

from tests.fakes.vllm import make_engine
from vllm_qualify.engine.environment import EngineEnvironment
from vllm_qualify.engine.server import ServerPlan


def plan_for(folder: Path, behaviour: str, startup_timeout_s: float = 30) -> ServerPlan:
    engine = make_engine(folder / "engine")
    return ServerPlan(
        engine=EngineEnvironment(python=engine / "bin" / "python"),
        model="/models/tiny",
        revision=None,
        served_model_name="tiny",
        arguments={"max-model-len": 64},
        environment={"TORCH_FAKE_VLLM": behaviour},
        startup_timeout_s=startup_timeout_s,
    )


def silent(_line: str) -> None:
    pass
