"""What shapes a server's replies besides its options: repositories of the hub and files, each pinned."""

from vllm_qualify.recipe.values import Frozen

MODEL = "model"


class Part(Frozen):
    """A repository of the hub, or a file or folder of this machine, that a server option names.

    `revision` is a commit of the hub, or `sha256:` with the digest of the content. `files` has the hub's hash of each file of a
    repository (`engine.hub.Repository`).
    """

    option: str
    name: str
    revision: str
    files: dict[str, str] = {}

    @property
    def is_of_the_hub(self) -> bool:
        return not self.revision.startswith("sha256:")
