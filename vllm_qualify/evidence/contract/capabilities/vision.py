"""Pictures of one colour, made here, and one that is broken. None is fetched from anywhere."""

import base64
import struct
import zlib

from pydantic import JsonValue

from vllm_qualify.evidence.contract.asked import Asked, need
from vllm_qualify.evidence.contract.capabilities.probe import LONG_TOK, Body, Probe, user
from vllm_qualify.evidence.contract.replies import check_refused, shown

SIDE_PX = 224
COLOURS = {"red": (255, 0, 0), "blue": (0, 0, 255), "green": (0, 128, 0), "yellow": (255, 255, 0)}
PAIRS = (("red", "blue"), ("green", "yellow"))
SIGNATURE = b"\x89PNG\r\n\x1a\n"
ONE, TWO = "Which colour is this picture? Answer with one word.", "Which colours do these two pictures have?"


def picture(colour: str) -> bytes:
    """A PNG of one colour (RGB, 8 bits; ISO/IEC 15948)."""
    row = b"\0" + bytes(COLOURS[colour]) * SIDE_PX
    header = struct.pack(">2I5B", SIDE_PX, SIDE_PX, 8, 2, 0, 0, 0)
    chunks = ((b"IHDR", header), (b"IDAT", zlib.compress(row * SIDE_PX)), (b"IEND", b""))
    return SIGNATURE + b"".join(_chunk(kind, body) for kind, body in chunks)


def _chunk(kind: bytes, body: bytes) -> bytes:
    return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))


def _shown_with(text: str, *pictures: bytes) -> Body:
    urls = [f"data:image/png;base64,{base64.b64encode(each).decode()}" for each in pictures]
    parts: list[JsonValue] = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    return user([*parts, {"type": "text", "text": text}])


def _names(asked: Asked, name: str, *colours: str) -> None:
    content = asked.chat(name).content
    missing = [colour for colour in colours if colour not in content.lower()]
    need(not missing, f"the reply to '{name}' does not name {' and '.join(missing)}: {shown(content)}")


def _pair(attempt: str) -> tuple[str, str]:
    return PAIRS[int(attempt.rpartition(" ")[2]) - 1]


def _one(asked: Asked, attempt: str) -> None:
    for colour in _pair(attempt):
        _names(asked, f"{attempt} {colour}", colour)


def _two(asked: Asked, attempt: str) -> None:
    _names(asked, attempt, *_pair(attempt))


def _broken(asked: Asked, attempt: str) -> None:
    check_refused(asked.said, f"{attempt} broken")
    _names(asked, f"{attempt} after", _pair(attempt)[0])


PROBES = (
    Probe(
        "vision",
        [{colour: _shown_with(ONE, picture(colour)) for colour in pair} for pair in PAIRS],
        _one,
        tokens=LONG_TOK,
    ),
    Probe("vision_two", [{"": _shown_with(TWO, *map(picture, pair))} for pair in PAIRS], _two, tokens=LONG_TOK),
    Probe(
        "vision_broken",
        [
            {
                "broken": _shown_with(ONE, SIGNATURE + b"\0" * 100),
                "after": _shown_with(ONE, picture(pair[0])),
            }
            for pair in PAIRS
        ],
        _broken,
        tokens=LONG_TOK,
    ),
)
