"""`make bench`: every contender in every round of one run, one table, and `bench/results.json`.

Absolute figures belong to the machine and the minute. What can be carried away is a ratio, and each is taken inside a
round between two contenders that ran within seconds of each other.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

import tokenlake
from bench import by_hand, floors, tokenlake_rows, tokenlake_stage
from bench.measure import Sample, Summary, Timing, ratio, summarize
from bench.reads import Reads
from bench.workload import BYTES_PER_TOKEN, Rollout, rollouts

RESULTS = Path(__file__).with_name("results.json")
WRITERS, THREADS = 4, 64


@dataclass(frozen=True, kw_only=True)
class Contender:
    """One row of the table."""

    work: str
    name: str
    against: str | None
    """The contender that the ratio is taken to."""
    run: Callable[[], Timing]
    units: int
    tokens: int
    unit: str = "calls"


@dataclass(frozen=True, kw_only=True)
class Size:
    """How much a run does."""

    rounds: int
    w1: tuple[int, int, int]
    """Rollouts, calls, tokens of a delta."""
    w3: tuple[int, int, int]
    w3_large: tuple[int, int, int]


FULL = Size(rounds=5, w1=(125, 16, 512), w3=(500, 8, 256), w3_large=(2000, 16, 512))
QUICK = Size(rounds=2, w1=(25, 16, 512), w3=(60, 8, 256), w3_large=(100, 16, 512))


def staging(size: Size, seed: int, scratch: Path) -> list[Contender]:
    """W1: one call at a time, many in flight, several processes; beside the floors."""
    count, calls, delta = size.w1
    work = rollouts(count, calls=calls, delta=delta, seed=seed)
    parts = [(len(range(i, count, WRITERS)), calls, delta, seed + i) for i in range(WRITERS)]
    fresh = partial(_in_fresh_folder, scratch)
    raw, raw_4, sqlite_4 = "raw append + fdatasync", f"raw, {WRITERS} processes", f"SQLite, {WRITERS} processes"
    rows: list[tuple[str, str | None, Callable[[], Timing]]] = [
        (raw, None, fresh(lambda folder: floors.raw_append(folder, work))),
        ("SQLite WAL, synchronous=FULL", raw, fresh(lambda folder: floors.sqlite_full(folder, work))),
        ("tokenlake, records built before", raw, fresh(lambda folder: tokenlake_stage.prepared(folder, work))),
        ("tokenlake, capture + stage", raw, fresh(lambda folder: tokenlake_stage.stage(folder, work))),
        ("tokenlake, capture + stage + commit", raw, fresh(lambda folder: tokenlake_stage.commit(folder, work))),
        (
            f"tokenlake, capture + stage, {THREADS} in flight",
            raw,
            fresh(lambda folder: tokenlake_stage.stage_threads(folder, work, threads=THREADS)),
        ),
        (raw_4, None, fresh(lambda folder: floors.raw_append_processes(folder, parts))),
        (sqlite_4, raw_4, fresh(lambda folder: floors.sqlite_full_processes(folder, parts))),
        (
            f"tokenlake, capture + stage, {WRITERS} processes",
            raw_4,
            fresh(lambda folder: tokenlake_stage.stage_processes(folder, parts)),
        ),
    ]
    units = count * calls
    return [
        Contender(work="W1", name=name, against=against, run=run, units=units, tokens=units * delta)
        for name, against, run in rows
    ]


def reading(size: Size, seed: int, scratch: Path) -> list[Contender]:
    """W2: the calls of one rollout by key, and all calls."""
    count, calls, delta = size.w1
    folder = scratch / "reads"
    folder.mkdir()
    reads = Reads(folder, rollouts(count, calls=calls, delta=delta, seed=seed))
    one, every = "one rollout: raw pread, places known", "all: raw pread, places known"
    asked = min(count, 100)
    rows: list[tuple[str, str | None, Callable[[], Timing]]] = [
        (one, None, reads.raw_one),
        ("one rollout: SQLite, by primary key", one, reads.sqlite_one),
        ("one rollout: tokenlake, places known", one, reads.places_one),
        ("one rollout: tokenlake, SQL", one, reads.query_one),
        (every, None, reads.raw_all),
        ("all: SQLite", every, reads.sqlite_all),
        ("all: tokenlake, SQL to Arrow", every, reads.query_all),
    ]
    made: list[Contender] = []
    for name, against, run in rows:
        units = (asked if name.startswith("one") else count) * calls
        made.append(Contender(work="W2", name=name, against=against, run=run, units=units, tokens=units * delta))
    return made


def linearizing(size: Size, seed: int, scratch: Path) -> list[Contender]:
    """W3: rollouts to verified rows, in SQL and by hand."""
    count, calls, delta = size.w3
    work = rollouts(count, calls=calls, delta=delta, seed=seed)
    path = scratch / "linear"
    coords = tokenlake_stage.fill(path, work)
    arrays = [by_hand.array_records(rollout, at) for rollout, at in zip(work, coords, strict=True)]
    lists = [by_hand.list_records(rollout, at) for rollout, at in zip(work, coords, strict=True)]
    _check_rows(work, tokenlake_rows.linear_rows(path)[1], arrays, lists)
    lake = tokenlake.open(path)
    numpy = "numpy by hand, from memory"
    rows: list[tuple[str, str | None, Callable[[], Timing]]] = [
        (numpy, None, lambda: _timed(lambda: [by_hand.numpy_row(records) for records in arrays])),
        ("tokenlake, SQL views, fresh open", numpy, lambda: tokenlake_rows.linear_rows(path)[0]),
        ("tokenlake, SQL views, lake open", numpy, lambda: tokenlake_rows.open_rows(lake)),
        ("tokenlake, its deltas by hand, lake open", numpy, lambda: tokenlake_rows.deltas_by_hand(lake)),
        ("per-token Python, from memory", numpy, lambda: _timed(lambda: [by_hand.python_row(r) for r in lists])),
    ]
    return _rows_a_second(rows, size_of=(count, calls, delta))


def _rows_a_second(
    rows: Sequence[tuple[str, str | None, Callable[[], Timing]]], size_of: tuple[int, int, int]
) -> list[Contender]:
    count, calls, delta = size_of
    tokens = count * calls * delta
    return [
        Contender(work="W3", name=name, against=against, run=run, units=count, tokens=tokens, unit="rows")
        for name, against, run in rows
    ]


def linearizing_much(size: Size, seed: int, scratch: Path) -> list[Contender]:
    """W3 again with sixteen times the tokens and more, where what a query costs by itself no longer counts."""
    count, calls, delta = size.w3_large
    work = rollouts(count, calls=calls, delta=delta, seed=seed)
    path = scratch / "large"
    coords = tokenlake_stage.fill(path, work)
    arrays = [by_hand.array_records(rollout, at) for rollout, at in zip(work, coords, strict=True)]
    numpy = f"numpy by hand, from memory, {count:,} rows"
    rows: list[tuple[str, str | None, Callable[[], Timing]]] = [
        (numpy, None, lambda: _timed(lambda: [by_hand.numpy_row(records) for records in arrays])),
        (f"tokenlake, SQL views, fresh open, {count:,} rows", numpy, lambda: tokenlake_rows.linear_rows(path)[0]),
    ]
    return _rows_a_second(rows, size_of=(count, calls, delta))


def nemo_gym(size: Size, seed: int, scratch: Path, python: Path) -> list[Contender]:
    """NeMo-Gym's capture and verifier, in its own environment."""
    made: list[Contender] = []
    for work, shape, key, against in (
        ("W1", size.w1, "stage_s", "raw append + fdatasync"),
        ("W3", size.w3, "linearize_s", "numpy by hand, from memory"),
    ):
        count, calls, delta = shape
        name = "NeMo-Gym 0.7.0, capture + synced JSON line" if work == "W1" else "NeMo-Gym 0.7.0, verify_and_linearize"
        run = _in_fresh_folder(scratch, partial(_peer, python, (count, calls, delta, seed), key))
        units = count * calls if work == "W1" else count
        tokens = count * calls * delta
        unit = "calls" if work == "W1" else "rows"
        made.append(Contender(work=work, name=name, against=against, run=run, units=units, tokens=tokens, unit=unit))
    return made


def _peer(python: Path, spec: Sequence[int], key: str, folder: Path) -> Timing:
    command = [str(python.absolute()), "-m", "bench.nemo_gym_peer", *map(str, spec), str(folder)]
    done = subprocess.run(command, cwd=Path(__file__).parents[1], capture_output=True, text=True, check=True)
    return 0.0, json.loads(done.stdout.splitlines()[-1])[key], []


def _in_fresh_folder(scratch: Path, run: Callable[[Path], Timing]) -> Callable[[], Timing]:
    def in_folder() -> Timing:
        folder = Path(tempfile.mkdtemp(dir=scratch))
        try:
            return run(folder)
        finally:
            shutil.rmtree(folder)

    return in_folder


def _timed(run: Callable[[], object]) -> Timing:
    start = time.monotonic()
    run()
    return start, time.monotonic(), []


def _check_rows(
    work: Sequence[Rollout],
    table: pa.Table,
    arrays: Sequence[Sequence[by_hand.ArrayRecord]],
    lists: Sequence[Sequence[by_hand.ListRecord]],
) -> None:
    """All three give the same rows, or nothing is measured."""
    found = {row["rollout_id"]: row for row in table.to_pylist()}
    for rollout, by_array, by_list in zip(work, arrays, lists, strict=True):
        ids, mask, logprobs = by_hand.numpy_row(by_array)
        row = found[rollout.rollout_id]
        if not (row["input_ids"] == ids.tolist() == rollout.token_ids and row["token_mask"] == mask.tolist()):
            raise AssertionError(f"{rollout.rollout_id}: SQL and numpy disagree about ids or mask")
        if not np.array_equal(np.asarray(row["logprobs"], np.float32), logprobs):
            raise AssertionError(f"{rollout.rollout_id}: SQL and numpy disagree about logprobs")
        if by_hand.python_row(by_list)[:2] != (ids.tolist(), mask.tolist()):
            raise AssertionError(f"{rollout.rollout_id}: Python and numpy disagree")


def _measure(contenders: Sequence[Contender], rounds: int) -> dict[str, list[Sample]]:
    samples: dict[str, list[Sample]] = {contender.name: [] for contender in contenders}
    for number in range(rounds):
        for contender in contenders:
            _progress(f"round {number + 1} of {rounds}: {contender.work} {contender.name}")
            start, end, latencies = contender.run()
            samples[contender.name].append(
                Sample(units=contender.units, tokens=contender.tokens, seconds=end - start, latencies=latencies)
            )
    _progress("")
    return samples


def _progress(text: str) -> None:
    if sys.stderr.isatty():
        sys.stderr.write(f"\r\x1b[K{text}")
        sys.stderr.flush()


def _line(contender: Contender, summary: Summary, times: float | None) -> str:
    megabytes = summary.tokens_per_s * BYTES_PER_TOKEN / 1e6
    rate = f"{summary.rate:9,.0f} {contender.unit + '/s':<7}"
    latency = "" if summary.p50_ms is None else f"{summary.p50_ms:8.2f} {summary.p99_ms:8.2f}"
    ratios = "" if times is None else f"{times:6.2f}x"
    return f"{contender.work}  {contender.name:<46} {rate} {megabytes:7.1f} {latency:>17}  {ratios}"


def main() -> None:
    """Parse, measure, print, write."""
    parser = argparse.ArgumentParser(prog="make bench", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a small run, to see that everything runs")
    parser.add_argument("--rounds", type=int, help="rounds (default: 5)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--dir", type=Path, help="where the lakes are written: the disk that is measured")
    parser.add_argument("--nemo-gym", type=Path, metavar="PYTHON", help="interpreter of an environment with nemo-gym")
    arguments = parser.parse_args()
    size = QUICK if arguments.quick else FULL
    with tempfile.TemporaryDirectory(dir=arguments.dir, prefix="tokenlake-bench-") as folder:
        scratch = Path(folder)
        contenders = [
            contender
            for work in (staging, reading, linearizing, linearizing_much)
            for contender in work(size, arguments.seed, scratch)
        ]
        if arguments.nemo_gym is not None:
            contenders += nemo_gym(size, arguments.seed, scratch, arguments.nemo_gym)
        samples = _measure(contenders, arguments.rounds or size.rounds)
    results: list[dict[str, Any]] = []
    print(f"{'':<4}{'contender':<46} {'rate':>9} {'':<7} {'MB/s':>9} {'p50 ms':>8} {'p99 ms':>8}  ratio")
    for contender in sorted(contenders, key=lambda one: one.work):
        summary = summarize(samples[contender.name])
        times = None if contender.against is None else ratio(samples[contender.name], samples[contender.against])
        print(_line(contender, summary, times))
        named = {"work": contender.work, "name": contender.name, "against": contender.against, "ratio": times}
        results.append({**named, **asdict(summary)})
    about = {
        "python": platform.python_version(),
        "duckdb": version("duckdb"),
        "pyarrow": version("pyarrow"),
        "cores": os.cpu_count(),
        "seed": arguments.seed,
        **asdict(size),
    }
    RESULTS.write_text(json.dumps({"about": about, "results": results}, indent=1) + "\n")
    print("Ratios are to the first line of the block, several processes to as many raw ones: docs/benchmarks.md")


if __name__ == "__main__":
    main()
