"""How the report writes numbers. A missing value is an en dash, so that a zero is never ambiguous."""

import math
from datetime import datetime
from typing import Any

MISSING = "–"
MINUS = "−"


def count(value: float | None) -> str:
    """1234567 -> 1,234,567."""
    return MISSING if value is None else _signed(f"{value:,.0f}")


def share(value: float | None) -> str:
    """0.4273 -> 42.7%."""
    return MISSING if value is None else _signed(f"{100 * value:.1f}%")


def number(value: float | None) -> str:
    """Four significant digits: 0.92751 -> 0.9275, 1234.5 -> 1,234, 0 -> 0."""
    if value is None or value != value:
        return MISSING
    if float(value).is_integer() and abs(value) < 1e15:
        return _signed(f"{value:,.0f}")
    if abs(value) >= 1000:
        return _signed(f"{value:,.0f}")
    if abs(value) < 1e-4:
        return _signed(f"{value:.3g}")
    return _signed(f"{value:.4g}")


def seconds(value: float | None) -> str:
    """0.42 -> 0.4 s, 95 -> 1 min 35 s, 7300 -> 2 h 2 min."""
    if value is None:
        return MISSING
    if value < 60:
        return f"{value:.1f} s"
    if round(value) < 3600:
        return f"{round(value) // 60} min {round(value) % 60} s"
    return f"{round(value / 60) // 60} h {round(value / 60) % 60} min"


def hours(value: float | None) -> str:
    """Seconds as hours: 5400 -> 1.5 h."""
    return MISSING if value is None else f"{value / 3600:.1f} h"


def size(value: float | None) -> str:
    """Bytes: 1536 -> 1.5 KiB."""
    if value is None:
        return MISSING
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if value < 1024 or unit == "TiB":
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    raise AssertionError("unreachable")


def flops(value: float | None) -> str:
    """Foundation-model work: 2.5e9 -> 2.5 GFLOP."""
    if value is None:
        return MISSING
    for unit in ("FLOP", "kFLOP", "MFLOP", "GFLOP", "TFLOP", "PFLOP"):
        if abs(value) < 1000 or unit == "PFLOP":
            return f"{value:.3g} {unit}" if value < 1000 else f"{value:,.0f} {unit}"
        value /= 1000
    raise AssertionError("unreachable")


def when(value: datetime | None) -> str:
    """2026-01-03 06:00; UTC, as the whole report."""
    return MISSING if value is None else value.strftime("%Y-%m-%d %H:%M")


def text(value: Any) -> str:
    """Text as it is; nothing for an empty one becomes the dash."""
    return MISSING if value is None or value == "" else str(value)


def interval(value: float | None, low: float | None, high: float | None, unit: str = "") -> str:
    """0.9275 [0.9235, 0.9315]: the figure with its 95% interval, where there is one.

    As many decimals for all three as give the interval's half-width two digits; more would be noise.
    """
    if value is None:
        return MISSING
    if low is None or high is None:
        return number(value) + unit
    return f"{_fixed(value, low, high)}{unit} {interval_alone(low, high)}"


def interval_alone(low: float, high: float) -> str:
    """[0.9235, 0.9315]: the brackets of interval()."""
    return f"[{_fixed(low, low, high)}, {_fixed(high, low, high)}]"


def _fixed(value: float, low: float, high: float) -> str:
    half = abs(high - low) / 2
    decimals = min(6, max(0, 1 - math.floor(math.log10(half)))) if 0 < half < math.inf else 4
    shown = _signed(f"{value:,.{decimals}f}")
    return shown.removeprefix(MINUS) if not shown.strip(f"{MINUS}0.") else shown


def _signed(shown: str) -> str:
    return shown.replace("-", MINUS, 1) if shown.startswith("-") else shown
