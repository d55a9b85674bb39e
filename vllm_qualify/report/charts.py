"""Line charts over time, as inline SVG."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from html import escape
from itertools import pairwise

# Sizes of the drawing, in its own units; the page sets its real width.
WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 640, 160, 56, 8, 24, 24
WRITTEN_WHOLE, SUFFIXES = 10_000, ((10**9, "G"), (10**6, "M"), (10**3, "k"))
DASHES = ("", "6 3", "2 3", "8 3 2 3")


def draw_chart(title: str, unit: str, time_s: Sequence[float], lines: Mapping[str, Sequence[float | None]]) -> str:
    """A line chart over time as an inline SVG in the text's own colour. A line is broken where a value is None.

    Raises ValueError if a line does not have one value per time, if there are more than four lines, or if all values are None.
    """
    if len(lines) > len(DASHES) or any(len(values) != len(time_s) for values in lines.values()):
        raise ValueError("a chart takes up to four lines, each with a value a time")
    known = [value for values in lines.values() for value in values if value is not None]
    if not known:
        raise ValueError("a chart needs at least one value")
    largest, last_s = max(*known, 0.0) or 1.0, max(time_s[-1], 0.0) or 1.0
    across = _scale(last_s, LEFT, WIDTH - RIGHT)
    up = _scale(largest, HEIGHT - BOTTOM, TOP)
    drawn = []
    for values, dash in zip(lines.values(), DASHES, strict=False):
        heights = [None if value is None else up(value) for value in values]
        drawn.append(_line_path(zip(map(across, time_s), heights, strict=True), dash))
    return "\n".join(
        [
            f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(title)}" xmlns="http://www.w3.org/2000/svg"'
            ' fill="none" stroke="currentColor" font-family="sans-serif" font-size="11">',
            f'<path d="M{LEFT} {TOP}V{HEIGHT - BOTTOM}H{WIDTH - RIGHT}" stroke-opacity="0.4"/>',
            *drawn,
            '<g fill="currentColor" stroke="none">',
            f'<text x="{LEFT}" y="{TOP - 10}">{escape(title)}</text>',
            f'<text x="{LEFT - 4}" y="{TOP + 4}" text-anchor="end">{_shorten(largest)}</text>',
            f'<text x="{LEFT - 4}" y="{TOP + 18}" text-anchor="end">{escape(unit)}</text>',
            f'<text x="{LEFT - 4}" y="{HEIGHT - BOTTOM}" text-anchor="end">0</text>',
            f'<text x="{WIDTH - RIGHT}" y="{HEIGHT - 8}" text-anchor="end">{_shorten(last_s)} s</text>',
            "</g>",
            *_legend_lines(list(lines)),
            "</svg>",
        ]
    )


def _shorten(number: float) -> str:
    rounded = float(f"{number:.4g}")
    if rounded < WRITTEN_WHOLE:
        return f"{rounded:.4g}"
    size, suffix = next(each for each in SUFFIXES if rounded >= each[0])
    return f"{rounded / size:.4g}{suffix}"


def _scale(largest: float, start: float, end: float) -> Callable[[float], float]:
    return lambda value: round(start + (end - start) * value / largest, 1)


def _line_path(places: Iterable[tuple[float, float | None]], dash: str) -> str:
    path, is_down = [], False
    for x, y in places:
        if y is not None:
            path.append(f"{'L' if is_down else 'M'}{x:g} {y:g}")
        is_down = y is not None
    # A value without neighbours becomes a dot: a line without length is visible by its round cap.
    steps = (f"{step}h0" if step[0] == following[0] == "M" else step for step, following in pairwise([*path, "M"]))
    return f'<path d="{"".join(steps)}" stroke-width="1.5" stroke-linecap="round" stroke-dasharray="{dash}"/>'


def _legend_lines(names: Sequence[str]) -> Iterator[str]:
    for place, (name, dash) in enumerate(zip(names, DASHES, strict=False)):
        x = WIDTH - RIGHT - 110 * (len(names) - place)
        yield f'<path d="M{x} {TOP - 14}h20" stroke-width="1.5" stroke-dasharray="{dash}"/>'
        yield f'<text x="{x + 24}" y="{TOP - 10}" fill="currentColor" stroke="none">{escape(name)}</text>'
