"""The published JSON: a whole command for each GPU type."""

import re
from functools import partial
from pathlib import Path

from vllm_qualify.errors import CallerError
from vllm_qualify.recipe.importing.commands import GPU_TYPES, Command, Gathered, check_deployment, expressible, translated
from vllm_qualify.recipe.importing.documents import Node, read_json, short

# The end of a path that is the same on every machine.
_IN_ITS_PLACE = re.compile(
    r"[^/]+/[^/]+/(hw(/[^/]+\.json|/[^/]+/strategies/[^/]+)?|strategies/[^/]+)$|models/[^/]+/[^/]+\.ya?ml$"
)


def gathered_json(source: Path, variant: str | None = None) -> Gathered:
    """The command of a file, or the commands of a folder `<org>/<repo>` or `<org>/<repo>/hw`.

    A model's own file `<org>/<repo>.json` has its command under `recommended_command`.

    For a folder, `variant` chooses one variant's commands. There may be none.

    Raises:
        CallerError: nothing is there, not readable, a key missing or of a wrong type.
        InexpressibleError: no recipe can express it; for a folder, if this holds for every file.
    """
    if not source.is_dir():
        document = read_json(source)
        recommended = document["recommended_command"]
        return Gathered(label(source), [translated(_command(recommended if recommended else document))], [])
    folder = source / "hw" if (source / "hw").is_dir() else source
    files = sorted(folder.glob("*.json"))
    if not files:
        raise CallerError(
            "there is no published JSON in this folder",
            "give a folder <org>/<repo> with hw/<gpu>.json, one of these files, or a YAML file",
            place=str(source),
        )
    documents = {file.name: read_json(file) for file in files}
    # For hardware that is too small for a variant, the file has the command of another variant.
    others = [name for name, document in documents.items() if variant not in (None, document["variant"].value)]
    asked = ((name, partial(_command, document)) for name, document in documents.items() if name not in others)
    commands, notes = expressible(asked)
    notes += [f"left out {name}: it has the variant {short(documents[name]['variant'].value)}" for name in others]
    return Gathered(f"{label(folder)}/*.json", commands, notes)


def label(path: Path) -> str:
    """The path, starting at the organization. Only the file name if the file is not in its usual place."""
    match = _IN_ITS_PLACE.search(path.absolute().as_posix())
    return match.group() if match else path.name


def _command(document: Node) -> Command:
    _check_one_server(document)
    argv = document["argv"].words()
    if argv[:2] != ["vllm", "serve"]:
        raise document["argv"].refused(f"the command {short(' '.join(argv[:2]))}: only `vllm serve` is")
    return Command(
        gpu_type=_gpu_type(document),
        variant=document["variant"].text() if document["variant"] else "default",
        words=argv[2:],
        environment=document["env"].environment(),
        image=document["docker_image"].text() if document["docker_image"] else None,
        origin=document["argv"],
    )


def _check_one_server(document: Node) -> None:
    """Raises InexpressibleError unless the document has one command for one node."""
    check_deployment(document["deploy_type"])
    if document["node_count"].count() > 1:
        raise document["node_count"].refused(f"a deployment on {document['node_count'].count()} nodes")
    for key, part in document.items():
        others = key == "companions" or (key.endswith(("argv", "argvs")) and key not in ("argv", "docker_argv"))
        if others and part.value:
            raise part.refused("several commands that run together")
    if not isinstance(document["argv"].value, list) or not document["argv"].value:
        raise document["argv"].wrong("the command, a list of words,")


def _gpu_type(document: Node) -> str:
    hardware = document["hardware"].text()
    if hardware not in GPU_TYPES:
        shown = document["hardware_profile"]["display_name"].value
        raise document["hardware"].refused(
            f"'{hardware}'{f' ({shown})' if isinstance(shown, str) else ''}, which is not a known GPU type",
            f"known here: {', '.join(GPU_TYPES)}",
        )
    return GPU_TYPES[hardware]
