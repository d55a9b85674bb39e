"""Pictures of one colour, made here, and one that is broken. None is fetched from anywhere."""

import base64
import struct
import zlib

from pydantic import JsonValue

from vllm_qualify.evidence.contract.capabilities.probe import Body, Probe, user_body
from vllm_qualify.evidence.contract.replies import need, shorten
from vllm_qualify.evidence.contract.transcript import Transcript

SIDE_PX = 224
COLOURS = {"red": (255, 0, 0), "blue": (0, 0, 255), "green": (0, 128, 0), "yellow": (255, 255, 0)}
PAIRS = (("red", "blue"), ("green", "yellow"))
SIGNATURE = b"\x89PNG\r\n\x1a\n"
BROKEN = SIGNATURE + b"\0" * 100
ONE, TWO = "Which colour is this picture? Answer with one word.", "Which colours do these two pictures have?"


def draw_picture(colour: str) -> bytes:
    """A PNG of one colour (RGB, 8 bits; ISO/IEC 15948)."""
    row = b"\0" + bytes(COLOURS[colour]) * SIDE_PX
    header = struct.pack(">2I5B", SIDE_PX, SIDE_PX, 8, 2, 0, 0, 0)
    chunks = ((b"IHDR", header), (b"IDAT", zlib.compress(row * SIDE_PX)), (b"IEND", b""))
    return SIGNATURE + b"".join(_png_chunk(kind, body) for kind, body in chunks)


def _png_chunk(kind: bytes, body: bytes) -> bytes:
    return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))


def _picture_body(text: str, *pictures: bytes) -> Body:
    urls = [f"data:image/png;base64,{base64.b64encode(each).decode()}" for each in pictures]
    parts: list[JsonValue] = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    return user_body([*parts, {"type": "text", "text": text}])


def _check_colours(replies: Transcript, name: str, *colours: str) -> None:
    content = replies.chat(name).content
    missing = [colour for colour in colours if colour not in content.lower()]
    need(not missing, f"the reply to '{name}' does not name {' and '.join(missing)}: {shorten(content)}")


def _pair_of(attempt: str) -> tuple[str, str]:
    return PAIRS[int(attempt.rpartition(" ")[2]) - 1]


def _check_one(replies: Transcript, attempt: str) -> None:
    for colour in _pair_of(attempt):
        _check_colours(replies, f"{attempt} {colour}", colour)


def _check_two(replies: Transcript, attempt: str) -> None:
    _check_colours(replies, attempt, *_pair_of(attempt))


def _check_broken(replies: Transcript, attempt: str) -> None:
    replies.check_refused(f"{attempt} broken")
    _check_colours(replies, f"{attempt} after", _pair_of(attempt)[0])


ONE_BODIES = {colour: _picture_body(ONE, draw_picture(colour)) for colour in COLOURS}
PROBES = (
    Probe("vision", [{colour: ONE_BODIES[colour] for colour in pair} for pair in PAIRS], _check_one),
    Probe("vision_two", [{"": _picture_body(TWO, *map(draw_picture, pair))} for pair in PAIRS], _check_two),
    Probe(
        "vision_broken",
        [{"broken": _picture_body(ONE, BROKEN), "after": ONE_BODIES[colour]} for colour, _ in PAIRS],
        _check_broken,
    ),
)
