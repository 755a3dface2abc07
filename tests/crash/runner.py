"""Kills, tears and refuses at every call of the store that changes a file, and checks the lake each of them leaves.

`python -m tests.crash.runner` (`make crash`) tries everything, or as much as there is time for: first one of each kind,
then one at each call, then the rest in the order of a seed. `--short` stops after the first. Prints what was tried of
what there is; exit 1 with the first lines of each failure.
"""

from __future__ import annotations

import argparse
import logging
import multiprocessing
import os
import random
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa

from tests.crash.disks import disk_trials
from tests.crash.known import Known
from tests.crash.scenario import STATIONS
from tests.crash.shim import Fault
from tests.crash.states import Run, record
from tests.crash.torn import torn_trials
from tests.crash.traced import traced_trials
from tests.crash.trials import PLACE, Killed, Outcome, Refused, Trial

_ALWAYS = ("ENOSPC", "EIO", "read-only")
_REFUSING = (0, 1, 2, 4)
"""Stations whose calls are refused one by one; station 3 repeats them in one life, and is killed only."""
_limit = 0.0
_trials: list[Trial] = []
"""What there is to do and until when, for the processes of the pool, which are forked."""


def every(run: Run, seed: int, known: Known) -> list[Trial]:
    """All trials, in the order in which they are tried."""
    trials: list[Trial] = [Killed(run=run, state=state, seed=seed, known=known) for state in run.states]
    for station in _REFUSING:
        for at, call in enumerate(run.calls[station], 1):
            name = call.split()[0]
            faults = [Fault(at=at, kind=kind) for kind in _ALWAYS]
            faults += [Fault(at=at, kind="short")] if name in ("write", "pwrite") else []
            faults += [Fault(at=at, kind="no room")] if name in ("open", "mkdir", "write", "pwrite") else []
            faults += [Fault(at=at, kind="no inodes")] if name in ("open", "mkdir") else []
            faults += [Fault(at=at)] if at % 12 == seed % 12 else []
            trials += [Refused(run=run, station=station, fault=fault, known=known) for fault in faults]
    order = random.Random(seed)
    trials += [*torn_trials(run), *traced_trials(run, known, order), *disk_trials(known)]
    return list(_in_turn(trials, order))


def _in_turn(trials: list[Trial], order: random.Random) -> Iterator[Trial]:
    """One of each kind, another life's each time; then one at each call; then the rest."""
    kinds: dict[str, list[Trial]] = {}
    for trial in trials:
        kinds.setdefault(trial.kind, []).append(trial)
    first: list[Trial] = []
    for turn, (_, same) in enumerate(sorted(kinds.items())):
        wanted = [trial for trial in same if trial.where and trial.where[0] == turn % len(STATIONS)] or same
        first.append(wanted[len(wanted) // 2])
    yield from first
    order.shuffle(trials)
    seen = {id(trial) for trial in first}
    covered = {trial.where for trial in first}
    for trial in trials:
        if trial.where not in covered:
            covered.add(trial.where)
            seen.add(id(trial))
            yield trial
    yield from (trial for trial in trials if id(trial) not in seen)


def attempt(number: int) -> Outcome | None:
    """One trial, unless the time is over."""
    return None if time.monotonic() > _limit else _trials[number]()


def show(broken: str) -> None:
    """The lines of a failure that say where it was."""
    lines = broken.splitlines()
    print(
        lines[0][:160], *[line for line in lines[1:] if "tokenlake/" in line][-3:], lines[-1], sep="\n    ", flush=True
    )


def report(run: Run, all_of: Outcome, trials: str) -> None:
    """What there was to try, and what was tried of it."""
    points = sum(len(calls) for calls in run.calls)
    print(f"{points} calls that change a file, in {len(STATIONS)} lives of a process; kills at them:")
    for name, count in run.tried.items():
        print(f"{count:6} {name}")
    print(f"leave {len(run.states)} states that are not the same")
    print(f"{trials} trials, {all_of.tried.total()} faults by kind:")
    for name, count in sorted(all_of.tried.items()):
        print(f"{count:6} {name}")
    print(f"leave {all_of.lakes} lakes; {all_of.different} of them, once open, are different: worked on and audited")


def main() -> int:
    """Run them all."""
    global _limit  # noqa: PLW0603  # as it says
    parser = argparse.ArgumentParser()
    parser.add_argument("--short", action="store_true", help="one of each kind")
    parser.add_argument("--only", default="", help="kinds whose name holds this")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--limit-s", type=float, default=1440.0)
    arguments = parser.parse_args()
    began = time.monotonic()
    logging.disable(logging.WARNING)  # a lake tells its operator what it met, which here is on purpose
    pa.array([0])  # imports pandas where it is installed: here once, instead of in every process of a trial
    base = Path(tempfile.mkdtemp(prefix="tokenlake-crash-", dir=PLACE if PLACE.is_dir() else None))
    try:
        (base / "known").mkdir()
        run = record(base)
        trials = every(run, arguments.seed, Known(base / "known"))
        _trials.extend(trial for trial in trials if arguments.only in trial.kind)
        kinds = {trial.kind for trial in _trials}
        print(f"prepared in {time.monotonic() - began:.0f} s", flush=True)
        _limit = time.monotonic() + arguments.limit_s
        count = len(kinds) if arguments.short else len(_trials)
        done, all_of = 0, Outcome()
        with multiprocessing.get_context("fork").Pool(arguments.jobs) as pool:
            for outcome in pool.imap_unordered(attempt, range(count)):
                if outcome is not None:
                    done += 1
                    all_of += outcome
                    for each in outcome.broken:
                        show(each)
    finally:
        shutil.rmtree(base)
    report(run, all_of, f"{done} of {len(_trials)}")
    print(f"seed {arguments.seed}, {len(all_of.broken)} failures, {time.monotonic() - began:.0f} s")
    return 1 if all_of.broken else 0


if __name__ == "__main__":
    sys.exit(main())
