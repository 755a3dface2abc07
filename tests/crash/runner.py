"""Runs the scenario in children that die or meet errors, and checks the lake each of them leaves.

`python -m tests.crash.runner` takes every call (`make crash`); with `--share K` every K-th of them,
begun at another one for each kind of fault. Prints what was tried; exit 1 with the first lines of each failure.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
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


def faults(calls: int, share: int) -> Iterator[tuple[str, Fault, Fault | None]]:
    """What is tried, by kind."""
    kinds: list[tuple[str, dict[str, Any]]] = [(f"kill, {mode}", {"kind": "kill", "mode": mode}) for mode in MODES]
    kinds += [("torn write, power", {"kind": "torn", "mode": "process"})]
    kinds += [(name, {"kind": name}) for name in ERRORS]
    kinds += [("read-only from here on", {"kind": "EROFS", "lasting": True})]
    for offset, (name, fault) in enumerate(kinds):
        for at in range(1 + offset % share, calls + 1, share):
            yield name, Fault(at=at, **fault), None
    for first in range(calls // 3, calls, calls // 3):
        for second in range(1, 20, share):
            yield "kill while starting", Fault(at=first), Fault(at=second, mode="power")


def main() -> int:
    """Run them all."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--share", type=int, default=1)
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
    counts: Counter[str] = Counter()
    broken: list[str] = []
    for name, fault, again in faults(calls, arguments.share):
        if time.monotonic() - began > arguments.limit_s:
            broken.append("the time was not enough")
            break
        counts[name] += 1
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
    print(f"{calls} calls change a file")
    for name, count in counts.items():
        print(f"{count:5} {name}")
    print(f"{sum(counts.values())} faults, {len(broken)} failures, {time.monotonic() - began:.0f} s")
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
