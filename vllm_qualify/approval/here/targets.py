"""Which kind of target a text names, and its comparison."""

from pathlib import Path

from vllm_qualify.approval.here.finding import Compared
from vllm_qualify.approval.here.folder import PLACE, compare_folder
from vllm_qualify.approval.verify import Verified
from vllm_qualify.errors import CallerError
from vllm_qualify.recipe.values import expand_user


def compare_target(text: str, approved: Verified, own_page: str | None = None) -> Compared:
    """Compare a folder of weights, an image or a server with an approval that holds.

    `own_page` is the qualified server's page of metrics. Raises CallerError if the text names none of the three, HostError if
    a folder cannot be read.
    """
    release, server = approved.qualified_release, approved.server
    if is_address(text):
        from vllm_qualify.approval.here.server import check_url, compare_server

        url = check_url(text)
        return Compared(target=url, kind="server", findings=compare_server(url, release, server, own_page))
    path = expand_user(text)
    if _is_folder(path):
        return Compared(target=str(path), kind="folder", findings=compare_folder(path, release, server))
    if text.startswith((".", "/", "~")):
        raise CallerError(f"there is no folder {text}", "name a folder of weights, an image or http://…", PLACE)
    from vllm_qualify.approval.here.image import compare_image

    return Compared(target=text, kind="image", findings=compare_image(text, release, server))


def is_address(text: str) -> bool:
    """Whether a target is meant as the URL of a server."""
    return "://" in text


def _is_folder(path: Path) -> bool:
    try:
        return path.is_dir()
    except (OSError, ValueError):
        return False
