"""Plots as SVG documents, which matplotlib writes, and their colors.

matplotlib is imported when a plot is drawn, not before: reports on terminals contain plots, but show tables.
"""

import io
import logging
import os
import re
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.figure import Figure

#: Colors of text, secondary text, lines and background. HTML pages replace these colors in dark mode.
INK, MUTED, LINE, PAPER = "#1f2328", "#6e7781", "#d0d7de", "#ffffff"
#: Colors of the Okabe-Ito palette, which people with any kind of color vision can distinguish.
BLUE, ORANGE, GREEN, RED, PURPLE, SKY = "#0072b2", "#e69f00", "#009e73", "#d55e00", "#cc79a7", "#56b4e9"

#: Function that draws a plot on an empty figure, and returns the height in pixels that the plot needs.
Draw = Callable[["Figure"], float]
#: Width of a plot in pixels. One pixel is 1/72 inch, so that points, matplotlib's unit of font sizes, are pixels.
WIDTH = 1060
_PIXELS_PER_INCH = 72
#: Fonts of text in SVG. Space for it is computed with DejaVu Sans, which matplotlib contains and which is wider.
_FONTS = "system-ui, 'Segoe UI', Helvetica, Arial, sans-serif"
_MEASURED_FONTS = "'DejaVu Sans', sans-serif"
_SETTINGS = {
    **dict.fromkeys(("axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color"), MUTED),
    **dict.fromkeys(("axes.spines.left", "axes.spines.right", "axes.spines.top"), False),
    **dict.fromkeys(("xtick.major.size", "ytick.major.size", "axes.xmargin"), 0),
    **dict.fromkeys(("font.size", "axes.titlesize"), 12),
    **dict.fromkeys(("figure.constrained_layout.h_pad", "figure.constrained_layout.w_pad"), 0.09),
    "axes.axisbelow": True,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "axes.titlelocation": "left",
    "axes.titleweight": "bold",
    "font.sans-serif": ["DejaVu Sans"],
    "grid.color": LINE,
    "legend.borderaxespad": 0.2,
    "legend.borderpad": 0.0,
    "legend.columnspacing": 1.2,
    "legend.frameon": False,
    "svg.fonttype": "none",
    "text.color": INK,
    "text.parse_math": False,
}


def write_svg(draw: Draw, name: str, title: str = "") -> str:
    """Return a plot as an SVG document, which is identical for identical data.

    Args:
        draw: Function that draws the plot.
        name: Name of the plot. Element ids of plots with different names differ, so that a page can contain them.
        title: Title above the plot. A plot with a title also has a background.
    """
    with _no_messages():
        style, new_figure = _load()
        with style.context(["default", _SETTINGS, {"svg.hashsalt": name}]):
            figure = new_figure(
                (WIDTH / _PIXELS_PER_INCH, 1), layout="constrained", facecolor=PAPER if title else "none"
            )
            height = draw(figure)
            if title:
                figure.suptitle(title, x=0.01, ha="left", fontsize=14, fontweight="bold")
                height += 22 * len(title.splitlines())
            figure.set_figheight(height / _PIXELS_PER_INCH)
            buffer = io.StringIO()
            figure.savefig(buffer, format="svg", metadata=dict.fromkeys(("Creator", "Date", "Format", "Type")))
    text = buffer.getvalue()
    text = text[text.index("<svg") :].replace(_MEASURED_FONTS, _FONTS)
    # Only clip paths, hatches and markers are referenced. Their ids depend on the name, those of groups do not.
    return re.sub(r'(<g) id="[^"]*"|\b((?:width|height)="[\d.]+)pt(?=")', r"\1\2", text)


def _load() -> tuple[Any, Any]:
    """Return matplotlib's module `style` and class `Figure`. SVG needs no backend, so MPLBACKEND may be anything."""
    backend = os.environ.pop("MPLBACKEND", None)
    try:
        from matplotlib import style
        from matplotlib.figure import Figure
    finally:
        if backend is not None:
            os.environ["MPLBACKEND"] = backend
    return style, Figure


@contextmanager
def _no_messages() -> Iterator[None]:
    """Suppress messages of matplotlib: no writable cache folder, creation of its list of fonts, empty axes."""
    logger = logging.getLogger("matplotlib")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            yield
    finally:
        logger.setLevel(level)
