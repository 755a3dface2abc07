"""How a run is timed: rounds in which every contender has its turn, medians, ratios inside a round.

A shared machine drifts by tens of percent within minutes, so a ratio is only taken between two figures of the same
round, and the median of those ratios is reported.
"""

from __future__ import annotations

import multiprocessing
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from multiprocessing.synchronize import Barrier
from typing import Any, TypeVar

__all__ = [
    "Sample",
    "Summary",
    "one_by_one",
    "quantile",
    "rate",
    "ratio",
    "summarize",
    "together",
    "typical",
    "writers",
]

T = TypeVar("T")
Timing = tuple[float, float, list[float]]
"""Monotonic start and end in seconds, and the seconds of each unit."""


@dataclass(frozen=True, kw_only=True)
class Sample:
    """What one contender did in one round."""

    value: float
    """In the unit of its row."""
    latencies: Sequence[float] = ()
    """Seconds of each call, row or group, where each is waited for."""


@dataclass(frozen=True, kw_only=True)
class Summary:
    """Medians over the rounds of one contender."""

    value: float
    p50_ms: float | None
    p99_ms: float | None
    rounds: Sequence[float]
    """The value of each round."""


def rate(timing: Timing, units: float) -> Sample:
    """`units` in the time that a run took, a second."""
    start, end, latencies = timing
    return Sample(value=units / (end - start), latencies=latencies)


def typical(latencies: Sequence[float]) -> Sample:
    """The median of some seconds, in milliseconds."""
    return Sample(value=statistics.median(latencies) * 1e3, latencies=latencies)


def quantile(latencies: Sequence[float], percent: int) -> float:
    """A quantile of some seconds, in milliseconds."""
    return sorted(latencies)[len(latencies) * percent // 100] * 1e3


def summarize(samples: Sequence[Sample]) -> Summary:
    """Medians of one contender's rounds."""
    timed = [sample.latencies for sample in samples if sample.latencies]
    return Summary(
        value=statistics.median(sample.value for sample in samples),
        p50_ms=statistics.median(quantile(run, 50) for run in timed) if timed else None,
        p99_ms=statistics.median(quantile(run, 99) for run in timed) if timed else None,
        rounds=[float(f"{sample.value:.5g}") for sample in samples],
    )


def ratio(samples: Sequence[Sample], base: Sequence[Sample], *, less: bool = False) -> float:
    """How many times as good as `base`: the median over rounds of the ratio inside the round.

    `less`: the smaller value is the better one.
    """
    pairs = zip(base, samples, strict=True) if less else zip(samples, base, strict=True)
    return statistics.median(a.value / b.value for a, b in pairs)


def one_by_one(put: Callable[[T], object], items: Iterable[T]) -> Timing:
    """Each item waits for the one before."""
    latencies: list[float] = []
    start = time.monotonic()
    for item in items:
        before = time.perf_counter()
        put(item)
        latencies.append(time.perf_counter() - before)
    return start, time.monotonic(), latencies


def together(put: Callable[[T], object], chains: Sequence[Sequence[T]], *, threads: int) -> Timing:
    """`threads` chains are in flight at a time; within a chain each item waits for the one before."""

    def run(chain: Sequence[T]) -> list[float]:
        return one_by_one(put, chain)[2]

    start = time.monotonic()
    with ThreadPoolExecutor(threads) as pool:
        parts = list(pool.map(run, chains))
    return start, time.monotonic(), [latency for part in parts for latency in part]


def writers(work: Callable[..., Timing], arguments: Sequence[tuple[Any, ...]]) -> Timing:
    """One process for each tuple of arguments; `work(barrier, *arguments)` waits at the barrier once it is ready.

    The clock runs from the first start to the last end.
    """
    context = multiprocessing.get_context("spawn")
    barrier = context.Barrier(len(arguments))
    results: Any = context.SimpleQueue()
    started = [context.Process(target=_writer, args=(results, work, barrier, args)) for args in arguments]
    for process in started:
        process.start()
    parts: list[Any] = [results.get() for _ in started]
    for process in started:
        process.join()
    failed = [part for part in parts if isinstance(part, str)]
    if failed:
        raise RuntimeError(f"{len(failed)} of {len(parts)} writers failed: {failed[0]}")
    starts, ends, latencies = zip(*parts, strict=True)
    return min(starts), max(ends), [latency for part in latencies for latency in part]


def _writer(results: Any, work: Callable[..., Timing], barrier: Barrier, arguments: tuple[Any, ...]) -> None:
    try:
        result: Timing | str = work(barrier, *arguments)
    except Exception as error:  # noqa: BLE001  # the border of a process: whatever it is, the parent has to hear of it
        barrier.abort()
        result = repr(error)
    results.put(result)
