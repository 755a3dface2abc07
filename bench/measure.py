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

__all__ = ["Sample", "Summary", "one_by_one", "ratio", "summarize", "together", "writers"]

T = TypeVar("T")
Timing = tuple[float, float, list[float]]
"""Monotonic start and end in seconds, and the seconds of each unit."""


@dataclass(frozen=True, kw_only=True)
class Sample:
    """What one contender did in one round."""

    units: int
    """Calls or rows."""
    tokens: int
    seconds: float
    latencies: Sequence[float] = ()
    """Seconds of each unit, where each is waited for."""

    @property
    def rate(self) -> float:
        """Units a second."""
        return self.units / self.seconds


@dataclass(frozen=True, kw_only=True)
class Summary:
    """Medians over the rounds of one contender."""

    rate: float
    tokens_per_s: float
    p50_ms: float | None
    p99_ms: float | None
    rates: Sequence[float]


def summarize(samples: Sequence[Sample]) -> Summary:
    """Medians of one contender's rounds."""
    timed = [sorted(sample.latencies) for sample in samples if sample.latencies]
    return Summary(
        rate=statistics.median(sample.rate for sample in samples),
        tokens_per_s=statistics.median(sample.tokens / sample.seconds for sample in samples),
        p50_ms=statistics.median(run[len(run) // 2] for run in timed) * 1e3 if timed else None,
        p99_ms=statistics.median(run[len(run) * 99 // 100] for run in timed) * 1e3 if timed else None,
        rates=[round(sample.rate, 1) for sample in samples],
    )


def ratio(samples: Sequence[Sample], base: Sequence[Sample]) -> float:
    """How many times as fast as `base`: the median over rounds of the ratio inside the round."""
    return statistics.median(a.rate / b.rate for a, b in zip(samples, base, strict=True))


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
