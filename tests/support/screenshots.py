"""Pictures of pages for the documents (`tests/run screenshots`): PNG files with 256 colours, a fraction of what the browser writes."""

import os
import zlib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from struct import pack, unpack

from playwright.sync_api import Page

__all__ = ["SCREENSHOTS", "smaller", "take"]

SCREENSHOTS = os.environ.get("JUPYTER_GPU_SCREENSHOTS")  # a folder; where they are kept is examples/screenshots
_SIGNATURE = b"\x89PNG\r\n\x1a\n"
_BYTES_OF_A_PIXEL = {2: 3, 6: 4}  # by the colour type: RGB, RGBA


def take(page: Page, name: str, *, full_page: bool = False) -> None:
    """Take a picture of the page as a reader sees it, if pictures are requested."""
    if SCREENSHOTS:
        taken = page.screenshot(animations="disabled", full_page=full_page)
        Path(SCREENSHOTS, f"{name}.png").write_bytes(smaller(taken))


def smaller(png: bytes) -> bytes:
    """Return the picture with its 256 most frequent colours; other colours become the nearest of these. For RGB or RGBA of 8 bits."""
    width, height = unpack(">II", png[16:24])
    rows = list(pixels(png))
    counts = Counter(pixel for row in rows for pixel in row)
    palette = [colour for colour, _ in counts.most_common(256)]
    number = {colour: at for at, colour in enumerate(palette)}
    for colour in counts:
        if colour not in number:
            number[colour] = min(range(256), key=lambda at, colour=colour: _apart(palette[at], colour))  # type: ignore[misc]
    lines = b"".join(b"\0" + bytes(number[pixel] for pixel in row) for row in rows)
    head = pack(">IIBBBBB", width, height, 8, 3, 0, 0, 0)
    chunks = ((b"IHDR", head), (b"PLTE", b"".join(palette)), (b"IDAT", zlib.compress(lines, 9)), (b"IEND", b""))
    return _SIGNATURE + b"".join(_chunk(kind, data) for kind, data in chunks)


def pixels(png: bytes) -> Iterator[list[bytes]]:
    """Yield each line's pixels, three bytes each: the filters of the PNG specification (section 9) undone, opacity left out."""
    assert png[:8] == _SIGNATURE
    width, _, depth, colours, _, _, interlaced = unpack(">IIBBBBB", png[16:29])
    assert (depth, interlaced) == (8, 0), "not what the browser writes"
    assert colours in _BYTES_OF_A_PIXEL, "not what the browser writes"
    size = _BYTES_OF_A_PIXEL[colours]
    packed, at = b"", 8
    while at < len(png):
        (length,) = unpack(">I", png[at : at + 4])
        packed += png[at + 8 : at + 8 + length] if png[at + 4 : at + 8] == b"IDAT" else b""
        at += length + 12
    data, stride = zlib.decompress(packed), width * size
    above = bytes(stride)
    for start in range(0, len(data), stride + 1):
        above = _unfiltered(data[start], bytearray(data[start + 1 : start + 1 + stride]), above, size)
        yield [above[left : left + 3] for left in range(0, stride, size)]


def _unfiltered(kind: int, line: bytearray, above: bytes, size: int) -> bytes:
    for at in range(len(line)) if kind else ():
        left, corner = (line[at - size], above[at - size]) if at >= size else (0, 0)
        up = above[at]
        if kind == 1:
            predicted = left
        elif kind == 2:
            predicted = up
        elif kind == 3:
            predicted = (left + up) // 2
        else:  # Paeth: of the three neighbours the one nearest to their plane
            plane = left + up - corner
            predicted = min((left, up, corner), key=lambda one: abs(plane - one))
        line[at] = (line[at] + predicted) & 255
    return bytes(line)


def _apart(one: bytes, other: bytes) -> int:
    return sum((mine - theirs) ** 2 for mine, theirs in zip(one, other, strict=True))


def _chunk(kind: bytes, data: bytes) -> bytes:
    return pack(">I", len(data)) + kind + data + pack(">I", zlib.crc32(kind + data))
