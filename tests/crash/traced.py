"""The same faults from outside of the process: `strace` kills it, or lets a call fail, at the kernel's door.

Where it is installed and may trace. It knows nothing of the store or of Python, and sees the calls of DuckDB too, so it
is a second witness: the shim's counts and states are not taken on trust.
"""

from __future__ import annotations

import os
import random
import re
import shutil
import signal
import subprocess
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from tests.crash.child import failure, finish, live, start
from tests.crash.known import Known
from tests.crash.laid import Laid
from tests.crash.scenario import Told
from tests.crash.shim import Fault
from tests.crash.states import Run, stored
from tests.crash.trials import Outcome, Trial, Where, checked, folder

_STATIONS = (0, 1, 2, 4)
_CHANGING = ("write", "pwrite64", "fsync", "fdatasync", "rename", "unlink", "mkdir", "ftruncate")
_TRIES = 3
_LINE = re.compile(r"(\d+) +(\w+)\((.*)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Traced:
    """One call of one thread, the nth of its name, that is never made: the process is killed, or told of an error."""

    run: Run
    station: int
    call: str
    nth: int
    what: str
    fault: str
    """`signal=SIGKILL` or `error=EIO`."""
    known: Known

    @property
    def kind(self) -> str:
        return f"strace, {'SIGKILL' if self._kills else self.fault.split('=')[1]}"

    @property
    def where(self) -> Where:
        return None

    def __call__(self) -> Outcome:
        done = Outcome()
        for _ in range(_TRIES):
            with folder() as base:
                lake = Laid(stored(self.run.begins[self.station]), base / "lake")
                rule = f"inject={self.call}:{self.fault}:when={self.nth}"
                mine, status = traced(lake, self.station, ["-e", f"trace={self.call}", "-e", rule], base / "log")
                if not self._kills and _missed(base / "log", f"{base}/lake"):
                    continue
                wrong = failure(mine, status) if status != (-signal.SIGKILL if self._kills else 0) else None
                if wrong is None:
                    wrong, _ = checked(lake, [*self.run.told_before(self.station), *mine], self.known, done)
                done.add(self.kind, f"{self.station} {self.call} {self.nth} {self.what}", wrong)
                return done
        done.add("strace, an error that met no file of the lake", f"{self.station} {self.call} {self.nth}", None)
        return done

    @property
    def _kills(self) -> bool:
        return self.fault.startswith("signal")


def traced(lake: Laid, station: int, rules: list[str], log: Path) -> tuple[Told, int]:
    """One life of the process under `strace`, which is there before the first call of interest."""
    ready, go = os.pipe()

    def work(fd: int) -> None:
        os.close(go)
        os.read(ready, 1)
        lake.pretend()
        live(lake.path, station, Fault(), fd)

    pid, reading = start(work)
    os.close(ready)
    command = ["strace", "-f", "-y", "-s", "0", "-o", str(log), *rules, "-p", str(pid)]
    tracer = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    attached = tracer.stderr is not None and "attached" in tracer.stderr.readline()
    os.write(go, b"!")
    os.close(go)
    told, status = finish(pid, reading)
    tracer.communicate()
    return (told, status) if attached else ([["error", "strace could not attach"]], 1)


def _missed(log: Path, lake: str) -> bool:
    """Whether an error met another file, the pipe to the harness for one: what else ran moves the count of a call."""
    injected = [line for line in log.read_text().splitlines() if "(INJECTED)" in line and "resumed>" not in line]
    return any(lake not in line for line in injected)


def points(run: Run, station: int) -> list[tuple[str, int, str]]:
    """Each call of a station's main thread that touches the lake: its name, the how-manieth, and the file."""
    with folder() as base:
        lake = Laid(stored(run.begins[station]), base / "lake")
        names = "trace=%file,%desc"
        _, status = traced(lake, station, ["-e", names], base / "log")
        if status:
            return []
        lines = [one.groups() for line in (base / "log").read_text().splitlines() if (one := _LINE.match(line))]
        counts: Counter[str] = Counter()
        found: list[tuple[str, int, str]] = []
        for thread, name, arguments in lines:
            if thread != lines[0][0]:
                continue
            counts[name] += 1
            if (at := arguments.find(f"{base}/lake")) >= 0:
                found.append((name, counts[name], re.split(r'[>",]', arguments[at + len(f"{base}/lake") :])[0]))
        return found


def traced_trials(run: Run, known: Known, order: random.Random) -> list[Trial]:
    """Kills and errors, as many of each as there is time for; none without `strace`.

    A kill at a call that only reads leaves what a kill at the next one that changes something leaves: few of those.
    """
    if shutil.which("strace") is None:
        return []
    kinds: dict[str, list[Trial]] = {}
    for station in _STATIONS:
        for name, nth, what in points(run, station):
            changes = name in _CHANGING
            for fault in ("signal=SIGKILL", *(("error=EIO", "error=ENOSPC") if changes else ())):
                trial = Traced(run=run, station=station, call=name, nth=nth, what=what, fault=fault, known=known)
                kinds.setdefault(f"{fault} {changes}", []).append(trial)
    shares = {"signal=SIGKILL True": 120, "signal=SIGKILL False": 30, "error=EIO True": 60, "error=ENOSPC True": 40}
    return [each for kind, trials in kinds.items() for each in order.sample(trials, min(shares[kind], len(trials)))]
