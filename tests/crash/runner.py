"""Runs the scenario in children that die or meet errors, and checks the lake each of them leaves.

`python -m tests.crash.runner` (`make crash`) tries every call with every kind of fault, in an order that a seed gives,
each kind in turn, until all are tried, `--count` of them, or the time is over. Prints what was tried of what there is;
exit 1 with the first lines of each failure.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable
from itertools import zip_longest
from pathlib import Path
from typing import Any

from tests.crash.scenario import Child, check, encode
from tests.crash.shim import KILLED, MODES, Fault, Shim
from tokenlake.errors import StorageFailed

ERRORS = ("ENOSPC", "EIO", "short")


def fork(work: Callable[[int], None]) -> tuple[list[list[Any]], int]:
    """Run `work(fd)` in a child; what it told over the pipe, and its exit status."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            os.close(reading)
            work(writing)
            status = 0
        except BaseException:
            os.write(writing, encode("error", traceback.format_exc()))
        finally:
            os._exit(status)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        told = [json.loads(line) for line in pipe.read().splitlines()]
    return told, os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def drive(path: Path, fault: Fault) -> tuple[list[list[Any]], int]:
    """The scenario under one fault."""

    def work(fd: int) -> None:
        raw = os.write
        shim = Shim(path, fault)
        shim.install()
        try:
            Child(path, lambda *told: raw(fd, encode(*told))).run()
        except StorageFailed:
            # The lake could not even be opened or closed: as good as killed here.
            raw(fd, encode("refused"))
        shim.stop()
        raw(fd, encode("calls", len(shim.calls)))

    return fork(work)


def reopen(path: Path, fault: Fault) -> int:
    """Only a start, under one fault: a crash while a crash is recovered from."""

    def work(fd: int) -> None:
        shim = Shim(path, fault)
        shim.install()
        Child(path, lambda *_: None).lake.close()

    return fork(work)[1]


def attempt(fault: Fault, again: Fault | None = None) -> str | None:
    """One child, one check; what went wrong, or None."""
    base = Path(tempfile.mkdtemp(dir="/dev/shm" if Path("/dev/shm").is_dir() else None))
    try:
        told, status = drive(base / "lake", fault)
        if fault.kind in ("kill", "torn") and status != KILLED:
            return f"{fault}: was not killed: {told[-1:]}"
        if fault.kind not in ("kill", "torn") and status != 0:
            return f"{fault}: {told[-1][-1]}"
        if again is not None:
            reopen(base / "lake", again)
        told = [each for each in told if each[0] != "calls"]
        failed, status = fork(lambda _: check(base / "lake", told))
        return None if status == 0 else f"{fault} {again}: {failed[-1][-1] if failed else status}"
    finally:
        shutil.rmtree(base)


def faults(calls: int, seed: int) -> list[tuple[str, Fault, Fault | None]]:
    """What is tried, each kind in turn, in the order of a seed."""
    kinds: list[tuple[str, dict[str, Any]]] = [(f"kill, {mode}", {"kind": "kill", "mode": mode}) for mode in MODES]
    kinds += [("torn write", {"kind": "torn", "mode": "process"})]
    kinds += [(name, {"kind": name}) for name in ERRORS]
    kinds += [("read-only from here on", {"kind": "EROFS", "lasting": True})]
    order = random.Random(seed)
    tries: list[list[tuple[str, Fault, Fault | None]]] = []
    for name, fault in kinds:
        tries.append([(name, Fault(at=at, **fault), None) for at in order.sample(range(1, calls + 1), calls)])
    again = [(first, second) for first in range(10, calls, 10) for second in range(1, 20)]
    tries.append(
        [
            ("kill while starting", Fault(at=first), Fault(at=second, mode="power"))
            for first, second in order.sample(again, len(again))
        ]
    )
    return [each for turn in zip_longest(*tries) for each in turn if each is not None]


def main() -> int:
    """Run them all."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--count", type=int)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--limit-s", type=float, default=1700.0)
    arguments = parser.parse_args()
    began = time.monotonic()
    base = Path(tempfile.mkdtemp())
    told, status = drive(base / "lake", Fault())
    shutil.rmtree(base)
    if status:
        print(told[-1][-1])
        return 1
    (calls,) = [rest[0] for kind, *rest in told if kind == "calls"]
    every = faults(calls, arguments.seed)
    counts: Counter[str] = Counter()
    points: set[int] = set()
    broken: list[str] = []
    for name, fault, again in every[: arguments.count]:
        if time.monotonic() - began > arguments.limit_s:
            break
        counts[name] += 1
        points.add(fault.at)
        wrong = attempt(fault, again)
        if wrong is not None:
            broken.append(f"{name}: {wrong}")
            print(
                broken[-1].splitlines()[0][:140],
                *[line for line in broken[-1].splitlines()[1:] if "tokenlake/" in line][-3:],
                broken[-1].splitlines()[-1],
                sep="\n    ",
                flush=True,
            )
    print(f"{len(points)} of {calls} calls that change a file, {counts.total()} of {len(every)} faults, by kind:")
    for name, count in counts.items():
        print(f"{count:5} {name}")
    print(f"seed {arguments.seed}, {len(broken)} failures, {time.monotonic() - began:.0f} s")
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
