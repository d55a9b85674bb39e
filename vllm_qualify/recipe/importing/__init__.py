"""Import from vllm-project/recipes: turns its published commands for a model and GPU types into a recipe of ours.

There are two sources. The published JSON (`<org>/<repo>/hw/<gpu>.json`) has whole commands, which are translated word by word.
The YAML (`models/<org>/<model>.yaml`, with taxonomy.yaml and strategies/ beside it) has the parts of a command. They are put
together only for one server on one node. If the JSON is available too, it is used instead.

A server of the imported recipe gets exactly the published arguments and environment. Anything that a recipe cannot express is
refused.
"""

from vllm_qualify.recipe.importing.conversion import import_recipe
from vllm_qualify.recipe.importing.documents import InexpressibleError
from vllm_qualify.recipe.importing.rendering import Imported, rendered, write_recipe

__all__ = ["Imported", "InexpressibleError", "import_recipe", "rendered", "write_recipe"]
