"""A small hub: repositories of this machine's files, as the Hugging Face hub gives them to its library."""

import hashlib
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from urllib.parse import unquote, urlsplit

from tests.releases.service import Answer, Asked, Service, serving

Files = Mapping[str, bytes]
COMMIT = "9" * 40


def git_blob(content: bytes) -> str:
    """Git's own hash of a file: `git hash-object`."""
    return hashlib.sha1(b"blob %d\0" % len(content) + content, usedforsecurity=False).hexdigest()


@contextmanager
def hub_of(repositories: Mapping[str, Files], commit: str = COMMIT) -> Iterator[Service]:
    """Each repository at one commit. Files that end in `.safetensors` are kept by Git LFS."""

    def answer(asked: Asked) -> Answer:
        path = unquote(urlsplit(asked.path).path).strip("/")
        for name, files in repositories.items():
            if path.startswith(f"api/models/{name}/tree/"):
                return Answer(body=json.dumps([_entry(file, content) for file, content in files.items()]).encode())
            if path.startswith(f"api/models/{name}"):
                siblings = [_sibling(file, content) for file, content in files.items()]
                about = {"id": name, "modelId": name, "sha": commit, "siblings": siblings}
                return Answer(body=json.dumps(about).encode(), headers={"Content-Type": "application/json"})
            if path.startswith(f"{name}/resolve/"):
                content = files.get(path.split("/", 4)[4] if name.count("/") else path.split("/", 3)[3])
                return Answer(404) if content is None else Answer(body=content, headers=_headers(content, commit))
        return Answer(404, headers={"X-Error-Code": "RepoNotFound"})

    with serving(answer) as service:
        yield service


def _sibling(path: str, content: bytes) -> dict[str, object]:
    about: dict[str, object] = {"rfilename": path, "size": len(content), "blobId": git_blob(content)}
    if path.endswith(".safetensors"):
        sha256 = hashlib.sha256(content).hexdigest()
        about["lfs"] = {"sha256": sha256, "size": len(content), "pointerSize": 130}
    return about


def _entry(path: str, content: bytes) -> dict[str, object]:
    """As the hub lists a file of a commit."""
    about: dict[str, object] = {"type": "file", "path": path, "size": len(content), "oid": git_blob(content)}
    if path.endswith(".safetensors"):
        about["lfs"] = {"oid": hashlib.sha256(content).hexdigest(), "size": len(content), "pointerSize": 130}
    return about


def _headers(content: bytes, commit: str) -> dict[str, str]:
    return {"X-Repo-Commit": commit, "ETag": f'"{git_blob(content)}"', "Accept-Ranges": "bytes"}
