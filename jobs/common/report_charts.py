"""Plots as inline SVG, each in a wide and a narrow variant, coloured by CSS variables so that one drawing suits light
and dark pages. Colours are Okabe and Ito's, which stay apart for colour-blind readers."""

import io
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib import import_module
from itertools import pairwise
from typing import Any

# Drawn in these, then replaced by the CSS variable of the name, which the page defines for light and dark.
COLORS = {
    "blue": "#0072b2",
    "orange": "#e69f00",
    "green": "#009e73",
    "sky": "#56b4e9",
    "purple": "#cc79a7",
    "vermillion": "#d55e00",
    "ink": "#010203",
    "muted": "#040506",
    "grid": "#070809",
    "none": "#0a0b0c",
    "surface": "#0d0e0f",
}
SIZES = {"wide": (8.6, 2.9), "narrow": (3.45, 2.6)}  # inches; at 4/3 pixels a point, 9 points read as 12 pixels
SERIES = ("blue", "orange", "green", "purple", "sky", "vermillion")


@dataclass(frozen=True)
class Chart:
    """A drawn plot: its title, what it shows in words, both SVG variants, and the legend as (label, colour, style)."""

    title: str
    alt: str
    svg: dict[str, str]
    legend: tuple[tuple[str, str, str], ...] = ()


def draw(
    title: str,
    alt: str,
    plot: Callable[[Any, bool], None],
    *,
    legend: Sequence[tuple[str, str, str]] = (),
    rows: int | None = None,
) -> Chart:
    """Draws `plot(axes, narrow)` in both sizes. rows: of a chart with one line a row, sets its height."""
    return Chart(title, alt, {name: _svg(plot, name, alt, rows, title) for name in SIZES}, tuple(legend))


def _svg(plot: Callable[[Any, bool], None], variant: str, alt: str, rows: int | None, title: str) -> str:
    import matplotlib
    from matplotlib.figure import Figure

    width, height = SIZES[variant]
    if rows is not None:
        height = 0.62 + 0.27 * rows
    style = {
        "svg.fonttype": "none",
        "svg.hashsalt": "solaris",
        "font.size": 9,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.spines.left": False,
        "axes.edgecolor": COLORS["muted"],
        "axes.labelcolor": COLORS["muted"],
        "text.color": COLORS["ink"],
        "xtick.color": COLORS["muted"],
        "ytick.color": COLORS["muted"],
        "grid.color": COLORS["grid"],
        "grid.linewidth": 0.8,
        "axes.axisbelow": True,
        "ytick.major.size": 0,
        "text.parse_math": False,
        "axes.unicode_minus": True,
        "lines.linewidth": 1.8,
        "lines.markersize": 4,
    }
    with matplotlib.rc_context(style):  # type: ignore[arg-type]
        figure = Figure(figsize=(width, height), layout="constrained")
        axes = figure.subplots()
        axes.grid(axis="x" if rows is not None else "y")
        plot(axes, variant == "narrow")
        buffer = io.StringIO()
        figure.savefig(
            buffer,
            format="svg",
            transparent=True,
            metadata={"Date": None, "Creator": None, "Format": None, "Type": None},
        )
    return _inline(buffer.getvalue(), f"{variant}-{re.sub(r'[^a-z0-9]+', '-', title.lower())}", alt)


def _inline(svg: str, prefix: str, alt: str) -> str:
    """matplotlib's SVG file as an inline element: unique ids, the page's fonts and colours, no global style."""
    from markupsafe import escape

    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>|<style[^>]*>.*?</style>|<!--.*?-->", "", svg, flags=re.DOTALL)
    svg = re.sub(r'\bid="([^"]+)"', rf'id="{prefix}-\1"', svg)
    svg = re.sub(r'(url\(#|href="#)', rf"\g<1>{prefix}-", svg)
    svg = re.sub(r"font: ([\d.]+)px [^;\"]*", r"font-size: \1px", svg)
    for name, color in COLORS.items():
        svg = svg.replace(color, f"var(--{name})")
    view = re.search(r'viewBox="([^"]+)"', svg)
    assert view, "matplotlib writes a viewBox"
    head = f'<svg class="plot {prefix.split("-")[0]}" viewBox="{view[1]}" role="img" aria-label="{escape(alt)}"'
    return re.sub(r"<svg[^>]*>", head + ' xmlns:xlink="http://www.w3.org/1999/xlink">', svg, count=1).strip()


def _matplotlib_dates() -> Any:
    """matplotlib.dates, whose functions carry no types."""
    return import_module("matplotlib.dates")


def _dates(axes: Any, narrow: bool) -> None:
    dates = _matplotlib_dates()

    locator = dates.AutoDateLocator(tz=UTC, minticks=3, maxticks=5 if narrow else 9)
    # Two days and a bit are too long for a tick each 12 hours on a phone, and too short for three days.
    locator.intervald[dates.HOURLY] = [1, 2, 3, 4, 6, 12, 24]
    axes.xaxis.set_major_locator(locator)
    axes.xaxis.set_major_formatter(dates.ConciseDateFormatter(locator, tz=UTC, show_offset=True))


def _only_day(axes: Any, times: Iterable[datetime]) -> None:
    """Around a single time, a day: by itself matplotlib would show years."""
    if len(different := set(times)) == 1:
        place = _matplotlib_dates().date2num(*different)
        axes.set_xlim(place - 0.5, place + 0.5)


def _percent(axis: Any, top: float = 1.0) -> None:
    from matplotlib.ticker import PercentFormatter

    axis.set_major_formatter(PercentFormatter(top, decimals=None if top != 1 else 0))


def stacked_bars(
    title: str,
    alt: str,
    times: Sequence[datetime],
    layers: Sequence[tuple[str, str, Sequence[float]]],
    *,
    percent: bool = False,
    unit: str = "",
) -> Chart:
    """Bars over time; each layer is (label, colour, one height a time)."""

    def plot(axes: Any, narrow: bool) -> None:
        dates = _matplotlib_dates()
        places = dates.date2num(list(times))
        gaps = [after - before for before, after in pairwise(places)]
        width = 0.84 * (min(gaps) if gaps else 0.25)
        base = [0.0] * len(times)
        for _, color, heights in layers:
            axes.bar(
                places, heights, width, bottom=base, color=COLORS[color], edgecolor=COLORS["surface"], linewidth=0.4
            )
            base = [low + height for low, height in zip(base, heights, strict=True)]
        if percent:
            axes.set_ylim(0, 1)
            _percent(axes.yaxis)
        else:
            axes.yaxis.set_major_formatter(_counts())
        _only_day(axes, times)
        axes.set_ylabel(unit)
        _dates(axes, narrow)

    return draw(title, alt, plot, legend=[(label, color, "box") for label, color, _ in layers])


def lines(
    title: str,
    alt: str,
    series: Sequence[tuple[str, str, str, Sequence[Any], Sequence[float]]],
    *,
    x: str = "",
    y: str = "",
    dated: bool = True,
    percent_x: bool = False,
    percent_y: bool = False,
    from_zero: bool = True,
    band: Any = None,
    points: Sequence[tuple[str, str, float, float]] = (),
) -> Chart:
    """Lines; each series is (label, colour, solid or dotted, xs, ys).

    points: (label, colour, x, y) drawn as large marks. band: {label: (lows, highs)} of series that have an interval.
    """

    def plot(axes: Any, narrow: bool) -> None:
        for label, color, style, xs, ys in series:
            marker = "o" if style == "solid" and len(xs) <= 40 else ""
            axes.plot(
                list(xs), list(ys), linestyle=":" if style == "dotted" else "-", marker=marker, color=COLORS[color]
            )
            if band and label in band:
                axes.fill_between(list(xs), *band[label], color=COLORS[color], alpha=0.18, linewidth=0)
        for _, color, place, height in points:
            axes.plot([place], [height], "D", markersize=8, color=COLORS[color], markeredgecolor=COLORS["surface"])
        if dated:
            _only_day(axes, (at for *_, xs, _ in series for at in xs))
            _dates(axes, narrow)
        if percent_x:
            _percent(axes.xaxis)
        if from_zero:
            axes.set_ylim(0, 1.08 * max((height for *_, ys in series for height in ys), default=0) or 1)
        if percent_y:
            _percent(axes.yaxis)
        else:
            axes.yaxis.set_major_formatter(_counts())
        axes.set_xlabel(x)
        axes.set_ylabel(y)

    legend = [(label, color, "line" if style == "solid" else "dots") for label, color, style, _, _ in series]
    return draw(title, alt, plot, legend=[*legend, *((label, color, "mark") for label, color, _, _ in points)])


def intervals(
    title: str,
    alt: str,
    rows: Sequence[tuple[str, float, float | None, float | None]],
    *,
    x: str,
    color: str = "blue",
) -> Chart:
    """One dot a row with its interval, a line at zero: (label, value, low, high), the first at the top."""

    def plot(axes: Any, narrow: bool) -> None:
        axes.axvline(0, color=COLORS["muted"], linewidth=1)
        for place, (_, value, low, high) in enumerate(rows):
            if low is not None and high is not None:
                axes.plot([low, high], [place, place], color=COLORS[color], linewidth=2.4, solid_capstyle="round")
            axes.plot([value], [place], "o", color=COLORS[color], markersize=6)
        _named_rows(axes, [label for label, *_ in rows])
        axes.set_xlabel(x)
        axes.margins(x=0.08)

    return draw(title, alt, plot, rows=len(rows))


def horizontal_bars(title: str, alt: str, rows: Sequence[tuple[str, float]], *, x: str, color: str = "blue") -> Chart:
    """One bar a row, the first at the top: (label, length)."""

    def plot(axes: Any, narrow: bool) -> None:
        axes.barh(range(len(rows)), [length for _, length in rows], 0.66, color=COLORS[color])
        _named_rows(axes, [label for label, _ in rows])
        axes.xaxis.set_major_formatter(_counts())
        axes.set_xlabel(x)

    return draw(title, alt, plot, rows=len(rows))


def histogram(
    title: str, alt: str, lefts: Sequence[float], heights: Sequence[float], width: float, *, x: str, y: str
) -> Chart:
    """Bars of given left ends and one width."""

    def plot(axes: Any, narrow: bool) -> None:
        axes.bar(
            list(lefts),
            list(heights),
            width,
            align="edge",
            color=COLORS["blue"],
            edgecolor=COLORS["surface"],
            linewidth=0.6,
        )
        axes.yaxis.set_major_formatter(_counts())
        axes.set_xlabel(x)
        axes.set_ylabel(y)

    return draw(title, alt, plot)


def scatter(
    title: str,
    alt: str,
    layers: Sequence[tuple[str, str, Sequence[float], Sequence[float]]],
    *,
    x: str,
) -> Chart:
    """Points of one scale in both directions; each layer is (label, colour, xs, ys), the last one on top."""

    def plot(axes: Any, narrow: bool) -> None:
        for _, color, xs, ys in layers:
            axes.plot(xs, ys, "o", markersize=2.6, color=COLORS[color], markeredgewidth=0, alpha=0.8)
        axes.set_aspect("equal", adjustable="datalim")
        axes.set_xticks([])
        axes.set_yticks([])
        axes.set_xlabel(x)

    return draw(title, alt, plot, rows=14, legend=[(label, color, "mark") for label, color, *_ in layers])


def _named_rows(axes: Any, labels: Sequence[str]) -> None:
    axes.set_yticks(range(len(labels)), labels, color=COLORS["ink"], parse_math=False)
    axes.set_ylim(len(labels) - 0.4, -0.6)


def _counts() -> Any:
    """1500 -> 1.5k, 2000000 -> 2M; small numbers as they are."""
    from matplotlib.ticker import FuncFormatter

    def shown(value: float, _: int) -> str:
        for limit, unit in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
            if abs(value) >= limit:
                return f"{value / limit:.4g}{unit}".replace("-", "−")
        return f"{value:.4g}".replace("-", "−")

    return FuncFormatter(shown)
