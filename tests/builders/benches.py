"""What tests of a real load client say of their model and server."""

from vllm_qualify.recipe.loading import catalog_folder

MODEL = str(catalog_folder() / "reference" / "model")


def nothing() -> None:
    """The server is well."""


def silent(_done: int, _total: int) -> None:
    """Nobody watches."""
