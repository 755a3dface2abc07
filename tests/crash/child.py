"""Processes that are thrown away: what they told over a pipe, and how they ended."""

from __future__ import annotations

import json
import logging
import os
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.crash.scenario import Child, Told
from tests.crash.shim import Fault, Shim
from tokenlake.errors import StorageFailed

Work = Callable[[int], None]
"""Called with a descriptor to tell over."""
_write = os.write


def tell(fd: int, *told: Any) -> None:
    """One line, in one write."""
    _write(fd, json.dumps(told).encode() + b"\n")


def start(work: Work) -> tuple[int, int]:
    """Run `work` in a child; its pid and the end of the pipe to read."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            os.close(reading)
            logging.disable(logging.ERROR)
            work(writing)
            status = 0
        except BaseException:
            tell(writing, "error", traceback.format_exc())
        finally:
            os._exit(status)
    os.close(writing)
    return pid, reading


def finish(pid: int, reading: int) -> tuple[Told, int]:
    """What a child told, and its exit status."""
    with os.fdopen(reading, "rb") as pipe:
        told = [json.loads(line) for line in pipe.read().splitlines()]
    return told, os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def fork(work: Work) -> tuple[Told, int]:
    """`work` in a child, from its start to its end."""
    return finish(*start(work))


def live(path: Path, station: int, fault: Fault, fd: int) -> None:
    """One life of the scenario's process under a fault."""
    shim = Shim(path, fault)
    shim.install()
    try:
        Child(path, lambda *told: tell(fd, *told), station).run()
    except StorageFailed:
        # The lake could not even be opened or closed: as good as killed here.
        tell(fd, "refused")
    shim.stop()


def failure(told: Told, status: int) -> str | None:
    """Why a child failed, or None."""
    if status == 0:
        return None
    return str(told[-1][-1]) if told and told[-1][0] == "error" else f"ended with {status}: {told[-1:]}"
