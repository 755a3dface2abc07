"""`make bench`: every contender in every round of one run, one table, and `bench/results.json`.

Absolute figures belong to the machine and the minute. What can be carried away is a ratio, and each is taken inside a
round between two contenders that ran within seconds of each other.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import platform
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

from bench.peers import PEERS
from bench.plan import FULL, QUICK, Plan, Size
from bench.table import HEAD, Contender, Row, lines, report

__all__ = ["WORKS", "measured", "parsed"]

RESULTS = Path(__file__).with_name("results.json")
WORKS = {
    "W1": "bench.works.staging",
    "W2": "bench.works.reading",
    "W3": "bench.works.linearizing",
    "group": "bench.works.group",
    "W4": "bench.works.lineage",
    "gate": "bench.works.gate",
    "open": "bench.works.opening",
    "loader": "bench.works.loading",
}
"""Each module's `rows(plan)` gives its rows, with contenders that were compared with each other."""


def measured(work: str, size: Size, seed: int, folder: Path | None, peers: Mapping[str, Path]) -> list[dict[str, Any]]:
    """The rows of one work, after all its rounds."""
    with tempfile.TemporaryDirectory(dir=folder, prefix="tokenlake-bench-") as scratch, ExitStack() as held:
        _progress(f"{work}: preparing")
        plan = Plan(size=size, seed=seed, scratch=Path(scratch), held=held, peers=peers)
        rows: Sequence[Row] = importlib.import_module(WORKS[work]).rows(plan)
        found: dict[Contender, list[Any]] = {figure.contender: [] for row in rows for figure in row.figures}
        for number in range(size.rounds):
            for contender, samples in found.items():
                _progress(f"{work}: round {number + 1} of {size.rounds}: {contender.name}")
                samples.append(contender.run())
        _progress("")
        return [report(row, found) for row in rows]


def _progress(text: str) -> None:
    if sys.stderr.isatty():
        sys.stderr.write(f"\r\x1b[K{text}")
        sys.stderr.flush()


def _peer(text: str) -> tuple[str, Path]:
    name, _, python = text.partition("=")
    if name not in PEERS or not python:
        raise argparse.ArgumentTypeError(f"{text!r} is no peer: there are {', '.join(PEERS)}, each as NAME=PYTHON")
    return name, Path(python)


def parsed(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The arguments of a run: `works` and `peers` are checked, `size` is whole."""
    parser = argparse.ArgumentParser(prog="make bench", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a small run, to see that everything runs")
    parser.add_argument("--only", default=",".join(WORKS), metavar="WORKS", help="works to measure (default: all)")
    parser.add_argument("--rounds", type=int, help="rounds (default: 5)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--open-calls", type=int, help="calls of the lake that is opened (default: 50,000)")
    parser.add_argument("--dir", type=Path, help="where the lakes are written: the disk that is measured")
    parser.add_argument(
        "--peer",
        type=_peer,
        action="append",
        default=[],
        dest="peers",
        metavar="NAME=PYTHON",
        help=f"a peer to measure and the interpreter of its environment, each one: {', '.join(PEERS)}",
    )
    found = parser.parse_args(arguments)
    found.works, found.peers = found.only.split(","), dict(found.peers)
    if unknown := set(found.works) - set(WORKS):
        parser.error(f"no work {', '.join(sorted(unknown))}: there are {', '.join(WORKS)}")
    size = QUICK if found.quick else FULL
    found.size = replace(size, rounds=found.rounds or size.rounds, open_calls=found.open_calls or size.open_calls)
    return found


def main() -> None:
    """Parse, measure, print, write."""
    arguments = parsed()
    began = time.monotonic()
    results: list[dict[str, Any]] = []
    print(HEAD, flush=True)
    for work in arguments.works:
        for row in measured(work, arguments.size, arguments.seed, arguments.dir, arguments.peers):
            print("\n".join(lines(row)), flush=True)
            results.append(row)
    about = {
        "python": platform.python_version(),
        "duckdb": version("duckdb"),
        "pyarrow": version("pyarrow"),
        "cores": os.cpu_count(),
        "seed": arguments.seed,
        "seconds": round(time.monotonic() - began),
        "peers": list(arguments.peers),
        **asdict(arguments.size),
    }
    RESULTS.write_text(json.dumps({"about": about, "results": results}, indent=1) + "\n")
    print("A ratio says how many times as good ours is; what is inside each clock: docs/benchmarks.md")


if __name__ == "__main__":
    main()
