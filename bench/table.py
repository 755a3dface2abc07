"""The table: a row has ours, a floor and peers, each a figure that a contender gave, and what ours is to them.

A ratio says how many times as good ours is: as fast where the unit is a rate, as quick or as small where it is a cost.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from bench.measure import Sample, ratio, summarize

__all__ = ["HEAD", "Contender", "Figure", "Measured", "Row", "alone", "lines", "report"]

_COSTS = frozenset({"ms", "us", "s", "B", "MiB"})
"""Units of which less is better."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Contender:
    """Somebody who does the work of some rows; runs once a round."""

    name: str
    run: Callable[[], Mapping[str, Sample]]
    """Does the work, and says what came of it by the name of what is measured."""


@dataclass(frozen=True, slots=True)
class Figure:
    """One thing that a contender measures."""

    contender: Contender
    measure: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One line of the table."""

    work: str
    what: str
    unit: str
    ours: Figure
    floor: Figure
    peers: Sequence[Figure] = ()

    @property
    def figures(self) -> tuple[Figure, ...]:
        """All that have to be measured."""
        return (self.floor, self.ours, *self.peers)


Measured = Mapping[Contender, Sequence[Mapping[str, Sample]]]
"""What every contender gave, round by round."""


def alone(name: str, run: Callable[[], Sample]) -> Figure:
    """The one figure of a contender that measures nothing else."""
    return Figure(Contender(name=name, run=lambda: {name: run()}), name)


def _samples(found: Measured, figure: Figure) -> list[Sample]:
    return [samples[figure.measure] for samples in found[figure.contender]]


def report(row: Row, found: Measured) -> dict[str, Any]:
    """The row as `bench/results.json` has it; `ratio` is ours to that figure."""
    ours = _samples(found, row.ours)

    def to(figure: Figure) -> dict[str, Any]:
        samples = _samples(found, figure)
        times = ratio(ours, samples, less=row.unit in _COSTS)
        return {"name": figure.contender.name, "ratio": times, **asdict(summarize(samples))}

    return {
        "work": row.work,
        "what": row.what,
        "unit": row.unit,
        "ours": {"name": row.ours.contender.name, **asdict(summarize(ours))},
        "floor": to(row.floor),
        "peers": [to(peer) for peer in row.peers],
    }


HEAD = (
    f"{'':<7}{'what':<46} {'unit':<10} {'ours':>9} {'p50 ms':>8} {'p99 ms':>8}  {'floor':>9} {'':<8} {'ratio':>7}"
    f"  {'peer':>9} {'':<13} {'ratio':>7}"
)


def lines(row: Mapping[str, Any]) -> Iterator[str]:
    """A reported row as it is printed, and a line more for each further peer."""
    ours, floor, peers = row["ours"], row["floor"], row["peers"]
    latencies = [" " * 8 if ours[name] is None else f"{ours[name]:8.2f}" for name in ("p50_ms", "p99_ms")]
    start = (
        f"{row['work']:<7}{row['what']:<46} {row['unit']:<10} {_number(ours['value']):>9} {' '.join(latencies)}"
        f"  {_beside(floor, 8)}"
    )
    cells = [_beside(peer, 13) for peer in peers] or [""]
    yield f"{start}  {cells[0]}".rstrip()
    for cell in cells[1:]:
        yield f"{'':<{len(start)}}  {cell}"


def _beside(figure: Mapping[str, Any], width: int) -> str:
    return f"{_number(figure['value']):>9} {figure['name']:<{width}} {_number(figure['ratio']) + 'x':>7}"


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}" if value >= 0.001 else f"{value:.1e}"
