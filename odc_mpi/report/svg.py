"""Elements of SVG charts: colors, shapes with hover text, hatches, text, and axes with round tick values."""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from html import escape
from itertools import pairwise
from typing import Any, NamedTuple

#: Colors of text, secondary text, lines and background. HTML pages replace these colors in dark mode.
INK, MUTED, LINE, PAPER = "#1f2328", "#6e7781", "#d0d7de", "#ffffff"
#: Colors of the Okabe-Ito palette, which people with any kind of color vision can distinguish.
BLUE, ORANGE, GREEN, RED, PURPLE, SKY = "#0072b2", "#e69f00", "#009e73", "#d55e00", "#cc79a7", "#56b4e9"

#: Width of a drawing and height of a line of text, in pixels.
WIDTH, LINE_HEIGHT = 1060, 16
#: Mean width in pixels of a character at the default font size of 12 pixels.
CHARACTER = 6.4
FONT = "system-ui, 'Segoe UI', Helvetica, Arial, sans-serif"
_DASHES = {"--": "6 4", ":": "2 3", "-.": "8 3 2 3"}
#: SVG path of each hatch, in a square of 8 by 8 pixels.
_HATCHES = {"/": "M0,8 L8,0", "\\": "M0,0 L8,8", "-": "M0,4 L8,4"}


class Style(NamedTuple):
    """Color of a bar or a line, and hatch of the bar ("/", "-", a backslash or "") or dashes of the line.

    A bar with the color "none" has only an outline and the hatch. Dashes are "-", "--", ":", "-." or "none".
    """

    color: str
    hatch: str = ""


@dataclass
class Drawing:
    """SVG drawing that is `WIDTH` pixels wide, with methods that add elements.

    `height` is in pixels. Callers must increase it when they add elements below it.
    """

    height: float = 0.0
    _parts: list[str] = field(default_factory=list)
    _hatches: dict[Style, str] = field(default_factory=dict)

    def add(self, tag: str, hover: str = "", content: str = "", **attributes: Any) -> None:
        """Add the SVG element `tag` with the text `content`. Underscores in attribute names are replaced by hyphens.

        A browser shows the text `hover` while the pointer is over the element.
        """
        inside = (f"<title>{escape(hover)}</title>" if hover else "") + escape(content)
        values = " ".join(f'{name.replace("_", "-")}="{_number(value)}"' for name, value in attributes.items())
        self._parts.append(f"<{tag} {values}>{inside}</{tag}>" if inside else f"<{tag} {values}/>")

    def text(self, x: float, y: float, content: str, color: str = INK, **attributes: Any) -> None:
        """Add a line of text. Its baseline starts at (x, y), unless `text_anchor` is "middle" or "end"."""
        self.add("text", content=content, x=x, y=y, fill=color, **attributes)

    def bar(self, x: float, y: float, width: float, height: float, style: Style, hover: str = "") -> None:
        """Add a rectangle filled with the color and the hatch of `style`."""
        box: dict[str, Any] = {"x": x, "y": y, "width": max(0.0, width), "height": max(0.0, height)}
        if style.color != "none":
            self.add("rect", hover, fill=style.color, **box)
        if style.hatch:
            self.add("rect", hover, fill=f"url(#{self._hatch(style)})", **box)
        if style.color == "none":
            self.add("rect", hover, fill="transparent", stroke=MUTED, stroke_width=0.5, **box)

    def line(self, points: Iterable[tuple[float, float]], style: Style) -> None:
        """Add a line through `points`, with a gap where y is NaN. A style with the hatch "none" draws nothing."""
        path, pen = [], "M"
        for x, y in points:
            if math.isnan(y):
                pen = "M"
            else:
                path.append(f"{pen}{_number(x)},{_number(y)}")
                pen = "L"
        if path and style.hatch != "none":
            dash = {"stroke_dasharray": dashes} if (dashes := _DASHES.get(style.hatch)) else {}
            self.add("path", d=" ".join(path), fill="none", stroke=style.color, stroke_width=1.8, **dash)

    def marker(self, x: float, y: float, marker: str, color: str) -> None:
        """Add a marker at (x, y): "o" circle, "s" square, "D" diamond, "^" triangle, "x" cross, or "" for no marker."""
        shapes = {"s": "M-4,-4 h8 v8 h-8 Z", "D": "M0,-5 l5,5 l-5,5 l-5,-5 Z", "^": "M0,-5 l5,9 h-10 Z"}
        if marker == "o":
            self.add("circle", cx=x, cy=y, r=4, fill=color)
        elif marker == "x":
            self.add("path", d=f"M{x - 4:.1f},{y - 4:.1f} l8,8 m0,-8 l-8,8", stroke=color, stroke_width=1.8)
        elif marker:
            self.add("path", d=shapes[marker], transform=f"translate({x:.1f},{y:.1f})", fill=color)

    def legend(self, x: float, y: float, entries: Iterable[tuple[str, Style, str]], as_bars: bool = False) -> None:
        """Add a row of legend entries, from left to right. Each entry consists of a label, a style and a marker."""
        for label, style, marker in entries:
            if as_bars:
                self.bar(x, y - 10, 20, 11, style)
            else:
                self.line([(x, y - 4), (x + 24, y - 4)], style)
                self.marker(x + 12, y - 4, marker, style.color)
            self.text(x + 30, y, label)
            x += 52 + CHARACTER * len(label)

    def document(self, name: str, title: Sequence[str]) -> str:
        """Return the drawing as an SVG document whose ids begin with `name`. With a title, it also has a background."""
        margin, top = (12, round(LINE_HEIGHT * 1.4 * len(title)) + 12) if title else (0, 0)
        width, height = WIDTH + 2 * margin, round(self.height) + top + margin
        size = f'width="{width}" height="{height}" viewBox="{-margin} {-top} {width} {height}"'
        head = Drawing()
        if title:
            head.add("rect", x=-margin, y=-top, width=width, height=height, fill=PAPER)
        for number, text in enumerate(title):
            head.text(0, LINE_HEIGHT * 1.4 * (number + 1) - top, text, font_size=15, font_weight="bold")
        hatches = "".join(
            f'<pattern id="{name}-{key}" width="8" height="8" patternUnits="userSpaceOnUse"><path '
            f'd="{_HATCHES[style.hatch[0]]}" stroke="{MUTED if style.color == "none" else PAPER}"/></pattern>'
            for style, key in self._hatches.items()
        )
        body = "\n".join([*head._parts, *self._parts]).replace("url(#", f"url(#{name}-")
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="{FONT}" font-size="12">'
            f"<defs>{hatches}</defs>\n{body}\n</svg>\n"
        )

    def _hatch(self, style: Style) -> str:
        return self._hatches.setdefault(style, f"hatch{len(self._hatches)}")


@dataclass
class Axes:
    """Rectangle within a drawing, with an x axis and a y axis, which may be logarithmic.

    Position and size are in pixels. The ranges are the values at the ends of the axes.
    """

    drawing: Drawing
    left: float
    top: float
    width: float
    height: float
    x_range: tuple[float, float]
    y_range: tuple[float, float] = (0.0, 1.0)
    log_x: bool = False
    log_y: bool = False

    def x(self, value: float) -> float:
        """Return the horizontal position of an x value in the drawing, in pixels from the left."""
        return self.left + self.width * _fraction(value, self.x_range, self.log_x)

    def y(self, value: float) -> float:
        """Return the vertical position of a y value in the drawing, in pixels from the top."""
        return self.top + self.height * (1 - _fraction(value, self.y_range, self.log_y))

    def draw_x(self, form: Callable[[float], str], values: Sequence[float] | None = None, min_unit: float = 0) -> None:
        """Draw the x axis with labels at `values`, by default at round numbers that are at least `min_unit` apart."""
        bottom = self.top + self.height
        for value in ticks(self.x_range, max(2, int(self.width / 75)), min_unit) if values is None else values:
            self.drawing.text(self.x(value), bottom + 17, form(value), MUTED, text_anchor="middle")
        self.drawing.add("path", d=f"M{self.left},{bottom} h{self.width:.1f}", stroke=MUTED)

    def draw_y(self, form: Callable[[float], str]) -> None:
        """Draw horizontal grid lines at round numbers on the y axis, with labels on the left."""
        count = max(2, int(self.height / 32))
        for value in log_ticks(self.y_range) if self.log_y else ticks(self.y_range, count):
            y = self.y(value)
            self.drawing.add("line", x1=self.left, y1=y, x2=self.left + self.width, y2=y, stroke=LINE, stroke_width=0.7)
            self.drawing.text(self.left - 8, y + 4, form(value), MUTED, text_anchor="end")

    def mark(self, value: float, text: str, rise: float = 0.0) -> None:
        """Draw a vertical line at an x value, beginning `rise` pixels above the axes, with `text` at its upper end."""
        x, y = self.x(value), self.top - rise
        self.drawing.line([(x, y), (x, self.top + self.height)], Style(INK))
        is_left = x + 5 + CHARACTER * len(text) > self.left + self.width
        self.drawing.text(x - 5 if is_left else x + 5, y + 10, text, text_anchor="end" if is_left else "start")

    def hover(self, x: Sequence[float], texts: Sequence[str]) -> None:
        """Divide the axes into areas around the ascending values `x`, and give each area one of the hover `texts`."""
        middles = [(a + b) / 2 for a, b in pairwise(self.x(value) for value in x)]
        edges = [self.left, *middles, self.left + self.width]
        for begin, end, text in zip(edges, edges[1:], texts, strict=False):
            box: dict[str, Any] = {"x": begin, "y": self.top, "width": max(0.0, end - begin), "height": self.height}
            self.drawing.add("rect", text, fill=INK, fill_opacity=0, **{"class": "hover"}, **box)


def ticks(limits: tuple[float, float], count: int, min_unit: float = 0) -> list[float]:
    """Return about `count` round numbers between two limits, evenly spaced and at least `min_unit` apart."""
    low, high = limits
    rough = max((high - low) / count, min_unit)
    size = 10.0 ** math.floor(math.log10(rough))
    unit = next(factor * size for factor in (1, 2, 5, 10) if factor * size >= rough * 0.999)
    first = math.ceil(low / unit - 1e-9)
    return [number * unit for number in range(first, math.floor(high / unit + 1e-9) + 1)]


def format_short(value: float) -> str:
    """Format a number with at most 4 significant digits, such as "0.25", "3000" or "2e-5"."""
    text = f"{value:.4g}" if not value or 1e-3 <= abs(value) < 1e5 else f"{value:.3e}"
    mantissa, _, exponent = text.partition("e")
    return f"{mantissa.rstrip('0').rstrip('.')}e{int(exponent)}" if exponent else text


def log_ticks(limits: tuple[float, float]) -> list[float]:
    """Return all numbers between two limits that are 1, 2 or 5 times a power of 10."""
    low, high = limits
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    return [value for power in powers for factor in (1, 2, 5) if low <= (value := factor * 10.0**power) <= high]


def _fraction(value: float, limits: tuple[float, float], is_log: bool) -> float:
    low, high = limits
    if is_log:
        low, high, value = math.log(low), math.log(high), math.log(value)
    return (value - low) / (high - low)


def _number(value: Any) -> str:
    """Return the text of an attribute value. Floats are rounded to two decimal places."""
    return f"{value:.2f}".rstrip("0").rstrip(".") if isinstance(value, float) else escape(str(value))
