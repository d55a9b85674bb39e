"""The network between nodes, from NCCL's lines in the server's log with NCCL_DEBUG=INFO. Pure."""

import re

from vllm_qualify.evidence.measurement import Measurement, invalid, valid
from vllm_qualify.recipe.metrics import NCCL_INFINIBAND

# NCCL writes one line for each channel and direction: which ranks, and "via" which transport. Between nodes the transport is
# NET/, the network's name and its device; within a node it is P2P, SHM or another. Any prefix of the lines is ignored.
_CHANNEL = re.compile(r"NCCL INFO Channel \S+ : \S+ -> \S+ (?:\[(?:send|receive)\] )?via (?P<transport>.+)")
_NETWORK = re.compile(r"NET/(?P<name>[^/]+)/")
# NCCL's own network IB, and NVIDIA's plug-ins for it: IBext, IBext_v8, …
_INFINIBAND = re.compile(r"IB(ext\w*)?")


def infiniband(log: str, source: str) -> Measurement:
    """1.0 if all of NCCL's channels between nodes use its network IB, which is InfiniBand or RoCE; 0.0 if one does not.

    Invalid if the log has no channel between nodes. That NCCL found InfiniBand does not mean that it uses it.
    """
    transports = [match["transport"].strip() for match in _CHANNEL.finditer(log)]
    networks = [match["name"] for transport in transports if (match := _NETWORK.match(transport))]
    if not transports:
        return invalid(NCCL_INFINIBAND, "the log has no NCCL channel: NCCL_DEBUG was not INFO, or it logged elsewhere", source)
    if not networks:
        problem = f"none of NCCL's {len(transports)} channels goes between nodes: {', '.join(sorted(set(transports)))}"
        return invalid(NCCL_INFINIBAND, problem, source)
    uses = all(_INFINIBAND.fullmatch(name) for name in networks)
    return valid(NCCL_INFINIBAND, float(uses), source, sample_count=len(networks))
