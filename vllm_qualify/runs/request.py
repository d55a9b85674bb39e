"""A request to qualify: the parameters of the flows `qualify-host` and `qualify-release`, and of the command `run`."""

from pydantic import BaseModel, ConfigDict, Field

from vllm_qualify.engine.provision import Launch
from vllm_qualify.plan.choice import Choice
from vllm_qualify.plan.request import Against, Reuse
from vllm_qualify.runs.home import default_store_url

# The work queues of a GPU pool of the fleet. Runs in the first queue go first.
RELEASE, REQUALIFICATION = "release", "requalification"


class QualifyHost(BaseModel):
    """What to qualify on one machine, and where the results go."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    recipe: str = Field(description="A recipe of the catalog (reference) or the path of a YAML file.")
    allow_code: bool = Field(
        default=False,
        description="Whether the recipe may run code or open its server, unless it is the catalog's; read it first.",
    )
    choice: Choice = Field(
        default=Choice(), description="Which of the recipe's cells; by default all on this machine's GPU type."
    )
    launch: Launch = Field(default=Launch(), description="How the server is started; for docker, from which image.")
    store: str = Field(default_factory=default_store_url, description="s3://bucket/prefix or file:///folder.")
    against: Against = Field(default=Against(), description="What the cells are compared with.")
    port: int | None = Field(default=None, ge=1, le=65535, description="The server's port; by default a free one.")
    price_usd_gpu_hour: float | None = Field(default=None, gt=0, description="What a GPU costs an hour; replaces the recipe's.")
    time_budget_s: float | None = Field(
        default=None, gt=0, description="How long each cell's load may take; replaces the recipe's. See load.time_budget_s."
    )
    reuse: Reuse = Field(
        default=Reuse(),
        description="The runs whose finished stages are reused if the inputs are the same: none, unfinished ones, or all.",
    )
    renew_days: int | None = Field(
        default=None,
        ge=0,
        description="Leave out cells whose approval is of the same inputs and holds for more than so many days."
        " Empty qualifies all.",
    )


class QualifyRelease(QualifyHost):
    """What to qualify, on which GPU types, and who decides."""

    gpu_types: list[str] = Field(
        default=[], description="On the fleet: the GPU types whose hosts qualify it. Empty qualifies on this machine."
    )
    queue: str = Field(default=RELEASE, description="On the fleet: the work queue. A release goes before a requalification.")
    release_key: str | None = Field(
        default=None, description="Of the event that started this: another run with the same key does nothing."
    )
    decision_timeout_s: float = Field(
        default=0,
        ge=0,
        description="On this machine: how long to wait for a person's decision about each report that passed and is not"
        " approved automatically. It is made with `vllm-qualify approve` or at the approver. 0 does not wait.",
    )
