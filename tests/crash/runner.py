"""Kills, tears and refuses at every call of the store that changes a file, and checks the lake each of them leaves.

`python -m tests.crash.runner` (`make crash`) tries everything, in an order that a seed gives, each kind in turn, until
all are tried or the time is over. Prints what was tried of what there is; exit 1 with the first lines of each failure.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import random
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from itertools import zip_longest
from pathlib import Path

from tests.crash.disks import disk_trials
from tests.crash.scenario import STATIONS
from tests.crash.shim import Fault
from tests.crash.states import Run, record
from tests.crash.torn import torn_trials
from tests.crash.traced import traced_trials
from tests.crash.trials import PLACE, Killed, Outcome, Refused

Trial = Callable[[], Outcome]
_ALWAYS = ("ENOSPC", "EIO", "read-only")
_REFUSING = (0, 1, 2, 4)
"""Stations whose calls are refused one by one; station 3 repeats them in one life, and is killed only."""
_limit = 0.0
_trials: list[Trial] = []
"""What there is to do and until when, for the processes of the pool, which are forked."""


def every(run: Run, seed: int, seen: Path, *, short: bool) -> list[list[Trial]]:
    """All trials by kind, each kind in the order of a seed."""
    kinds: dict[str, list[Trial]] = {}
    for state in run.states:
        kinds.setdefault(state.name, []).append(Killed(run=run, state=state, seed=seed))
    for station in _REFUSING:
        for at, call in enumerate(run.calls[station], 1):
            name = call.split()[0]
            faults = [Fault(at=at, kind=kind) for kind in _ALWAYS]
            faults += [Fault(at=at, kind="short")] if name == "write" else []
            faults += [Fault(at=at, kind="no room")] if name in ("open", "mkdir", "write") else []
            faults += [Fault(at=at, kind="no inodes")] if name in ("open", "mkdir") else []
            faults += [Fault(at=at)] if at % 12 == seed % 12 else []
            for fault in faults:
                kinds.setdefault(fault.kind, []).append(Refused(run=run, station=station, fault=fault, seen=seen))
    order = random.Random(seed)
    for trials in kinds.values():
        order.shuffle(trials)
    torn = torn_trials(run, order)
    if short:
        # Another kind comes first each time: not all of them fit.
        order.shuffle(turns := [*kinds.values(), torn])
        return turns
    return [*kinds.values(), torn, traced_trials(run, seen, order), disk_trials(run)]


def attempt(number: int) -> Outcome | None:
    """One trial, unless the time is over."""
    return None if time.monotonic() > _limit else _trials[number]()


def show(broken: str) -> None:
    """The lines of a failure that say where it was."""
    lines = broken.splitlines()
    print(
        lines[0][:160], *[line for line in lines[1:] if "tokenlake/" in line][-3:], lines[-1], sep="\n    ", flush=True
    )


def main() -> int:
    """Run them all."""
    global _limit  # noqa: PLW0603  # as it says
    parser = argparse.ArgumentParser()
    parser.add_argument("--count", type=int, help="at most so many trials")
    parser.add_argument("--short", action="store_true", help="one process, a few seconds, no second witness")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--limit-s", type=float, default=1500.0)
    arguments = parser.parse_args()
    if arguments.short:
        arguments.jobs, arguments.limit_s = 1, 8.0
    began = time.monotonic()
    base = Path(tempfile.mkdtemp(prefix="tokenlake-crash-", dir=PLACE if PLACE.is_dir() else None))
    try:
        (base / "seen").mkdir()
        run = record(base)
        kinds = every(run, arguments.seed, base / "seen", short=arguments.short)
        print(f"prepared in {time.monotonic() - began:.0f} s", flush=True)
        _trials.extend(each for turn in zip_longest(*kinds) for each in turn if each is not None)
        _limit = time.monotonic() + arguments.limit_s
        done, tried, broken = 0, Counter[str](), list[str]()
        with multiprocessing.get_context("fork").Pool(arguments.jobs) as pool:
            for outcome in pool.imap_unordered(attempt, range(len(_trials[: arguments.count]))):
                if outcome is None:
                    continue
                done += 1
                tried += outcome.tried
                broken += outcome.broken
                for each in outcome.broken:
                    show(each)
    finally:
        shutil.rmtree(base)
    points = sum(len(calls) for calls in run.calls)
    print(f"{points} calls that change a file, in {len(STATIONS)} lives of a process; kills at them:")
    for name, count in run.tried.items():
        print(f"{count:6} {name}")
    print(f"leave {len(run.states)} lakes that are not the same")
    print(f"{done} of {len(_trials)} trials, {tried.total()} faults by kind:")
    for name, count in sorted(tried.items()):
        print(f"{count:6} {name}")
    print(f"seed {arguments.seed}, {len(broken)} failures, {time.monotonic() - began:.0f} s")
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
