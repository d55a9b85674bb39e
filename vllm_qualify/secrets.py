"""Secrets never reach a log, an artifact, a report or a command line; and codes of a log never reach a terminal."""

import base64
import json
import os
import re
import unicodedata
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import quote, unquote

from vllm_qualify.recipe.serving import is_secret_name

MARK = b"[redacted]"
# A shorter value, like `true` of HF_HUB_DISABLE_IMPLICIT_TOKEN, is a word of results too.
SHORTEST_SECRET = 6
# From this length on a value is a secret also in the middle of a word.
LONG_SECRET = 8
_IN_ADDRESS = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://[^/\s:@]*:([^/\s@]+)@")
_LETTER = rb"[A-Za-z0-9]"
_BASE64 = frozenset(b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/-_")


def known_secrets() -> list[str]:
    """The secrets in this process's environment, longest first: by the names of variables, and passwords in addresses."""
    return sorted({secret for secret in _find_secrets() if len(secret) >= SHORTEST_SECRET}, key=len, reverse=True)


def has_password(value: str) -> bool:
    """Whether it has an address with a password in it."""
    return bool(_IN_ADDRESS.search(value))


def redact(text: str) -> str:
    return _redact_bytes(text.encode(errors="surrogatepass")).decode(errors="surrogatepass")


def safe_text(text: str) -> str:
    """Outside text as a terminal may show it: without secrets, and with nothing in it that the terminal obeys."""
    return plain(redact(text))


def plain(text: str) -> str:
    """Outside text with control, format and surrogate characters as escapes. Line ends and tabs stay."""
    if text.isprintable():
        return text
    return "".join(
        character.encode("unicode_escape").decode()
        if unicodedata.category(character) in ("Cc", "Cf", "Cs") and character not in "\n\t"
        else character
        for character in text
    )


def redact_file(path: Path) -> None:
    """Redact the secrets in a file. A file without secrets is not rewritten."""
    content = path.read_bytes()
    if (without := _redact_bytes(content)) != content:
        path.write_bytes(without)


def redact_files(folder: Path) -> None:
    for path in folder.rglob("*"):
        if path.is_file():
            redact_file(path)


def _find_secrets() -> Iterator[str]:
    for name, value in os.environ.items():
        # The pattern alone takes long for long values, and this is asked for each piece of a log.
        for password in _IN_ADDRESS.findall(value) if "://" in value else ():
            yield from (password, unquote(password))
        if is_secret_name(name):
            yield value
            # Of a user and a password, as in PREFECT_API_AUTH_STRING, the password alone.
            yield value.partition(":")[2]


def _redact_bytes(content: bytes) -> bytes:
    secrets = known_secrets()
    for secret in secrets:
        for form in _encoded_within(secret.encode(errors="surrogateescape")):
            content = _redact_runs_with(form, content)
    for form in sorted({form for secret in secrets for form in _written_forms(secret)}, key=len, reverse=True):
        if len(form) >= LONG_SECRET:
            content = content.replace(form, MARK)
        else:
            content = re.sub(rb"(?<!%b)%b(?!%b)" % (_LETTER, re.escape(form), _LETTER), MARK, content)
    return content


def _encoded_within(secret: bytes) -> Iterator[bytes]:
    """The letters that a secret has in the base64 of a longer text, like `user:token`: they depend on its place there."""
    for place in range(3):
        encoded = base64.b64encode(b"\0" * place + secret).rstrip(b"=")
        # The first and the last letter have bits of what stands beside.
        whole = encoded[(0, 2, 3)[place] : len(encoded) - bool((place + len(secret)) % 3)]
        if len(whole) >= LONG_SECRET:
            yield from {whole, whole.translate(bytes.maketrans(b"+/", b"-_"))}


def _redact_runs_with(form: bytes, content: bytes) -> bytes:
    """The content without each run of base64 that has the form in it."""
    pieces, at = [], 0
    while (start := content.find(form, at)) >= 0:
        end = start + len(form)
        while start > at and content[start - 1] in _BASE64:
            start -= 1
        while end < len(content) and content[end] in _BASE64:
            end += 1
        pieces += [content[at:start], MARK]
        at = end + len(content[end : end + 2]) - len(content[end : end + 2].lstrip(b"="))
    return b"".join([*pieces, content[at:]]) if pieces else content


def _written_forms(secret: str) -> list[bytes]:
    """As it is, in JSON, in an address, and by base64, as in the header of a login."""
    given = secret.encode(errors="surrogateescape")
    written = (json.dumps(secret)[1:-1], json.dumps(secret, ensure_ascii=False)[1:-1], quote(given, safe=""))
    return [given, *(text.encode(errors="surrogateescape") for text in written), base64.b64encode(given)]
