"""Distributions as bars: counts in, geometry out; the template draws them as SVG."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["Bar", "Chart", "by_number", "in_bins"]

_WIDTH, _HEIGHT = 300, 64
_MOST_BARS = 12


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    """One bar, in the units of the chart's view box."""

    label: str
    count: int
    x: float
    y: float
    width: float
    height: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Chart:
    """A bar chart of a distribution."""

    total: int
    bars: list[Bar]
    width: int = _WIDTH
    height: int = _HEIGHT

    @property
    def text(self) -> str:
        """The chart for who cannot see it."""
        return ", ".join(f"{bar.label}: {bar.count}" for bar in self.bars)


def by_number(values: Sequence[int]) -> Chart:
    """One bar a whole number from the lowest to the highest; bins where that would be too many."""
    if not values:
        return _chart([])
    low, high = min(values), max(values)
    if high - low >= _MOST_BARS:
        return in_bins([float(value) for value in values])
    counts = Counter(values)
    return _chart([(str(number), counts[number]) for number in range(low, high + 1)])


def in_bins(values: Sequence[float]) -> Chart:
    """One bar a value where they are few, as rewards often are, else bins of equal width."""
    counts = Counter(values)
    if len(counts) <= _MOST_BARS:
        return _chart([(f"{value:g}", counts[value]) for value in sorted(counts)])
    low, high = min(values), max(values)
    step = (high - low) / _MOST_BARS
    bins = Counter(min(int((value - low) / step), _MOST_BARS - 1) for value in values)
    return _chart([(f"{low + i * step:.3g}", bins[i]) for i in range(_MOST_BARS)])


def _chart(counted: Sequence[tuple[str, int]]) -> Chart:
    if not counted:
        return Chart(total=0, bars=[])
    most = max(count for _, count in counted) or 1
    slot = _WIDTH / max(len(counted), 4)
    bars = [
        Bar(
            label=label,
            count=count,
            x=round(i * slot + 1, 2),
            y=round(_HEIGHT - _HEIGHT * count / most, 2),
            width=round(slot - 2, 2),
            height=round(_HEIGHT * count / most, 2),
        )
        for i, (label, count) in enumerate(counted)
    ]
    return Chart(total=sum(count for _, count in counted), bars=bars)
