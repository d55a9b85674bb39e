"""Pictures of accuracy tasks: taken out of the questions, named there by their hash, and put back into what is sent.

So the evidence of a question has the hash and the size of its pictures, and no bytes. lm-eval itself would hold all of them
decoded, would hash a question by an address in memory, and gives two questions that differ only by picture the same prompt.
"""

import base64
import binascii
import hashlib
import json
from collections.abc import Callable, Iterable, Iterator
from io import BytesIO
from typing import Any

from vllm_qualify.evidence.accuracy.picture_limits import NO_LIMITS, PictureLimits

# How a picture is written in a file of local questions, and how a chat sends it.
DATA_URL = "data:image/"
# Decoders of other forms are rarely used, and each is a way in for a file from outside.
FORMS = ("PNG", "JPEG", "WEBP", "GIF")
# The largest of MMMU's pictures have some 20 million pixels. Each takes three bytes or four while it is checked.
MOST_PIXELS = 50_000_000
MOST_BYTES = 50_000_000
# How the name of a picture begins.
NAMED = "picture of "
WRITE_IT_SO = f"write it as `{DATA_URL}png;base64,…`, of a whole {', '.join(FORMS)} of {MOST_PIXELS:,} pixels at most"


class UnusablePictureError(ValueError):
    """A picture that is none, or too large: what is wrong."""


class Pictures:
    """The pictures of a task, by the reference that stands for each in its questions. A picture is kept as it came."""

    def __init__(self, limits: PictureLimits = NO_LIMITS) -> None:
        self._limits = limits
        self._urls: dict[str, str] = {}
        self._pixels: dict[str, int] = {}

    def taken_from(self, questions: Iterable[dict[str, Any]]) -> Iterator[dict[str, Any]]:
        """The questions, each with references in place of its pictures.

        Raises UnusablePictureError, with the place of the question, counted from 1.
        """
        for number, question in enumerate(questions, start=1):
            try:
                yield _change_pictures(question, self._name_picture)
            except UnusablePictureError as error:
                raise UnusablePictureError(f"question {number}: {error}") from error

    def _name_picture(self, url: str) -> str:
        body = _decode_body(url)
        width, height = _read_size(body)
        most = self._limits.most_pixels
        if most is not None and width * height > most:
            raise UnusablePictureError(
                f"a picture has {width:,} x {height:,} pixels, more than VLLM_MAX_IMAGE_PIXELS, {most:,}"
            )
        reference = f"{NAMED}{width} x {height}, sha256 {hashlib.sha256(body).hexdigest()}"
        self._urls[reference], self._pixels[reference] = url, width * height
        return reference

    def prompt(self, chat: str, references: object) -> str:
        """A chat, as text, whose last message shows the pictures before its text, as lm-eval's `create_image_prompt` does.

        Raises UnusablePictureError if one is not of the task's data, or the server does not take so large ones together.
        """
        shown = references if isinstance(references, list) else [references]
        if odd := next((each for each in shown if each not in self._urls), None):
            raise UnusablePictureError(f"{str(odd)[:80]!r} stands where the task shows a picture")
        pixels, most = sum(self._pixels[str(each)] for each in shown), self._limits.most_pixels_together
        if most is not None and pixels > most:
            many = f"{len(shown)} pictures of one question have {pixels:,} pixels"
            raise UnusablePictureError(f"{many}, more than VLLM_MAX_MEDIA_REQUEST_DECODE_BYTES has room for, {most:,}")
        messages = json.loads(chat)
        text = {"type": "text", "text": messages[-1]["content"]}
        messages[-1]["content"] = [*map(_picture_part, shown), text]
        return json.dumps(messages, ensure_ascii=False)

    def put_into(self, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """The messages as they are sent, with the pictures themselves."""
        return [message | {"content": self._restore_pictures(message["content"])} for message in messages]

    def _restore_pictures(self, content: Any) -> Any:
        if not isinstance(content, list):
            return content
        return [
            _picture_part(self._urls[part["image_url"]["url"]]) if part["type"] == "image_url" else part for part in content
        ]


def _picture_part(url: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url, "detail": "auto"}}


def with_urls(question: dict[str, Any]) -> dict[str, Any]:
    """A question of a data set with its pictures as data URLs, as a file of local questions has them.

    Raises UnusablePictureError.
    """
    return _change_pictures(question, str)


def _change_pictures(question: dict[str, Any], change: Callable[[str], str]) -> dict[str, Any]:
    """The question with what each data URL of its pictures, also of those in lists, is changed to."""

    def change_value(value: Any) -> Any:
        if isinstance(value, list):
            return [change_value(each) for each in value]
        url = url_of(value)
        return value if url is None else change(url)

    return {name: change_value(value) for name, value in question.items()}


def url_of(value: Any) -> str | None:
    """A picture as a data URL; None if the value is none. The hub's data has its bytes.

    Raises UnusablePictureError, also if there is only the path of a file: a question could name any file of this machine.
    """
    if isinstance(value, str):
        return value if value.startswith(DATA_URL) else None
    if not (isinstance(value, dict) and value.keys() == {"bytes", "path"}):
        return None
    body = value["bytes"]
    if not isinstance(body, bytes):
        raise UnusablePictureError("a picture has no bytes, only a path or a text")
    with _open_picture(body) as picture:
        return f"{DATA_URL}{str(picture.format).lower()};base64,{base64.b64encode(body).decode()}"


def _decode_body(url: str) -> bytes:
    head, _, text = url.partition(",")
    if not head.endswith(";base64"):
        raise UnusablePictureError(f"the picture {head[:40]!r} is not in base64")
    if len(text) > MOST_BYTES * 4 / 3 + 4:
        raise UnusablePictureError(f"a picture has more than {MOST_BYTES:,} bytes")
    try:
        return base64.b64decode(text, validate=True)
    except binascii.Error as error:
        raise UnusablePictureError(f"a picture is not in base64: {error}") from error


def _read_size(body: bytes) -> tuple[int, int]:
    """Width and height, in pixels, of a picture that can be decoded as a whole."""
    with _open_picture(body) as picture:
        width, height = picture.size
        if width * height > MOST_PIXELS:
            raise UnusablePictureError(f"a picture has {width:,} x {height:,} pixels, where {MOST_PIXELS:,} in all are allowed")
        try:
            picture.load()
        # Decoders raise anything on a damaged file.
        except Exception as error:
            raise UnusablePictureError(f"a picture cannot be decoded: {error}") from error
    return width, height


def _open_picture(body: bytes) -> Any:
    from PIL import Image

    # The limit here is MOST_PIXELS.
    Image.MAX_IMAGE_PIXELS = None
    try:
        return Image.open(BytesIO(body), formats=FORMS)
    # Readers of a file's head raise anything, too.
    except Exception as error:
        raise UnusablePictureError(f"a picture is no {' or '.join(FORMS)}: {error}".split(" <_io")[0]) from error
