"""Replies that must have a form, where nothing names the backend that keeps it: a warning before anything is measured."""

from vllm_qualify.engine.server import ServerPlan
from vllm_qualify.recipe.contract import Contract
from vllm_qualify.recipe.paths import FORMS, FORMS_OPTION, names_backend
from vllm_qualify.recipe.serving import VLLM


def form_warnings(server: ServerPlan, contract: Contract | None) -> list[str]:
    """That the first form decides for all others, where the contract promises forms; empty if a backend is named."""
    promised = [each for each in (contract.capabilities if contract else []) if each in FORMS]
    if server.kind != VLLM or not promised or names_backend(server.arguments):
        return []
    return [
        f"`capabilities` promise {' and '.join(promised)}, and `{FORMS_OPTION}` names no backend: in vLLM the first form after"
        " a start then decides for all others, and clients may ask for another one first than the contract does;"
        f" `{FORMS_OPTION}: {{backend: xgrammar}}` keeps or refuses each form by itself since vLLM 0.32"
    ]
