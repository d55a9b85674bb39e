"""Import slow libraries only when they are first used: most commands use none of them."""

import importlib
from typing import Any


class Lazy:
    """Stands in for a module. Write the real import beside it for the type checker:

    if TYPE_CHECKING:
        import docker
    else:
        docker = Lazy("docker")

    An annotation that names the module needs quotes.
    """

    def __init__(self, module: str) -> None:
        self._module = module

    def __getattr__(self, name: str) -> Any:
        return getattr(importlib.import_module(self._module), name)
