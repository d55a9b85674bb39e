"""The chain of a cell: its approved baselines, each of which may be a little worse than the one before it.

The first of them is the cell's anchor, until one is approved that was made to be an anchor. A revoked one is no part of it.
"""

from collections.abc import Sequence

from vllm_qualify.approval.pointer import read_pointer
from vllm_qualify.publish.bundle import Manifest, read_manifest
from vllm_qualify.publish.layout import manifest_key
from vllm_qualify.publish.store import MissingObjectError, Store


def chain_of(store: Store, cell: str) -> list[Manifest]:
    """The approved baselines of a cell, the oldest first.

    Raises:
        TamperedError: the cell's pointer is not as it was written.
        StoreError: the store cannot be read.
    """
    pointer = read_pointer(store, cell)
    approved = [entry.run_id for entry in pointer.entries if not entry.revoked] if pointer else []
    manifests = (_manifest(store, cell, run_id) for run_id in approved)
    return [manifest for manifest in manifests if manifest and manifest.is_baseline]


def anchor_in(chain: Sequence[Manifest]) -> Manifest | None:
    """The newest baseline that was made to be an anchor, or else the first; None of an empty chain."""
    return next((manifest for manifest in reversed(chain) if manifest.new_anchor), next(iter(chain), None))


def _manifest(store: Store, cell: str, run_id: str) -> Manifest | None:
    try:
        return read_manifest(store, manifest_key(cell, run_id))
    except MissingObjectError:
        return None
