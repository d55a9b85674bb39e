"""Which probes belong to which capability, in the order in which they are tried."""

from collections.abc import Callable, Collection, Mapping
from operator import attrgetter

from vllm_qualify.evidence.contract.capabilities import chat, json_schema, reasoning, responses, tools, vision
from vllm_qualify.evidence.contract.capabilities.probe import Probe
from vllm_qualify.evidence.contract.transcript import Transcript
from vllm_qualify.recipe.contract import Capability

PROBES: Mapping[Capability, tuple[Probe, ...]] = {
    "chat": chat.PROBES,
    "tools": tools.PROBES,
    "parallel_tools": tools.PARALLEL,
    "reasoning": reasoning.PROBES,
    "json_schema": json_schema.PROBES,
    "vision": vision.PROBES,
    "responses": responses.PROBES,
}
HOLDS: Mapping[str, Callable[[Transcript], None]] = {
    f"contract_{check}": holds
    for check, holds in [
        *((probe.check, probe.judge) for probes in PROBES.values() for probe in probes),
        *chat.OF_OTHERS.items(),
        *reasoning.OF_OTHERS.items(),
    ]
}


def probes_of(capabilities: Collection[Capability]) -> list[Probe]:
    probes = (probe for capability, probes in PROBES.items() if capability in capabilities for probe in probes)
    return sorted(probes, key=attrgetter("is_last"))


def most_requests(capabilities: Collection[Capability]) -> int:
    """How many requests there are if no attempt but the last holds."""
    return sum(len(attempt) for probe in probes_of(capabilities) for attempt in probe.attempts)
