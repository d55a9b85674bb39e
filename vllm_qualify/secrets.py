"""Secrets never reach a log, an artifact, a report or a command line."""

import os
from pathlib import Path

from vllm_qualify.recipe.serving import is_secret_name

MARK = "[redacted]"
SHORTEST_SECRET = 8


def known_secrets() -> list[str]:
    """The values of this process's environment variables whose names mark them as secrets; longest first."""
    found = {value for name, value in os.environ.items() if is_secret_name(name) and len(value) >= SHORTEST_SECRET}
    return sorted(found, key=len, reverse=True)


def redact(text: str) -> str:
    for secret in known_secrets():
        text = text.replace(secret, MARK)
    return text


def redact_file(path: Path) -> None:
    """Redact the secrets in a file. A file without secrets is not rewritten."""
    found = [secret.encode() for secret in known_secrets()]
    content = path.read_bytes() if found else b""
    if any(secret in content for secret in found):
        for secret in found:
            content = content.replace(secret, MARK.encode())
        path.write_bytes(content)


def redact_files(folder: Path) -> None:
    for path in folder.rglob("*"):
        if path.is_file():
            redact_file(path)
