"""Import from vllm-project/recipes: a command that it publishes for a model and a GPU type, as a recipe of ours.

Two sources. The published JSON (`<org>/<repo>/hw/<gpu>.json`) has whole commands, which are translated word by word. The YAML
(`models/<org>/<model>.yaml`, with taxonomy.yaml and strategies/ beside it) has the parts of a command; they are put together
for one server on one node only, and where the JSON is at hand it is believed instead.

A server of the imported recipe gets exactly the published arguments and environment. What a recipe cannot say is refused.
"""

from vllm_qualify.recipe.importing.conversion import import_recipe
from vllm_qualify.recipe.importing.documents import InexpressibleError
from vllm_qualify.recipe.importing.rendering import Imported, rendered, write_recipe

__all__ = ["Imported", "InexpressibleError", "import_recipe", "rendered", "write_recipe"]
