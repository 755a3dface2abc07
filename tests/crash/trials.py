"""What is tried: each trial makes one lake suffer and checks what is left. Run in any process, in any order."""

from __future__ import annotations

import random
import shutil
import tempfile
from collections import Counter
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol, Self

from tests.crash.check import check
from tests.crash.child import failure, fork, live, tell
from tests.crash.known import Known
from tests.crash.laid import Laid
from tests.crash.scenario import Told
from tests.crash.shim import KILLED, Fault, Shim, Tree, read_tree
from tests.crash.states import Recorder, Run, State, digest, stored

PLACE = Path("/dev/shm")
"""In memory where there is such a place: what is tested is the order of calls, not a disk."""

Where = tuple[int, int] | None
"""A life of the process and the call in it, 1 the first; None: a place of its own."""


@dataclass(slots=True)
class Outcome:
    """What some trials came to."""

    tried: Counter[str] = field(default_factory=Counter[str])
    broken: list[str] = field(default_factory=list[str])
    lakes: int = 0
    """How many lakes were left and opened."""
    different: int = 0
    """How many of these were none that was there already."""

    def add(self, name: str, what: str, wrong: str | None) -> None:
        """Count one trial, and keep why it failed."""
        self.tried[name] += 1
        if wrong is not None:
            self.broken.append(f"{name}, {what}: {wrong}")

    def __iadd__(self, other: Outcome) -> Self:
        self.tried += other.tried
        self.broken += other.broken
        self.lakes += other.lakes
        self.different += other.different
        return self


class Trial(Protocol):
    """Something to try."""

    @property
    def kind(self) -> str:
        """As it is counted."""
        ...

    @property
    def where(self) -> Where:
        """What it is tried at."""
        ...

    def __call__(self) -> Outcome:
        """Try it."""
        ...


@contextmanager
def folder() -> Generator[Path]:
    """A folder of a trial's own."""
    base = Path(tempfile.mkdtemp(prefix="tokenlake-crash-", dir=PLACE if PLACE.is_dir() else None))
    try:
        yield base
    finally:
        shutil.rmtree(base)


def checked(lake: Laid, told: Told, known: Known, done: Outcome, starts: Path | None = None) -> tuple[str | None, Told]:
    """What is wrong with a lake, looked at by a process of its own, and the states that a kill of this one leaves.

    The states are written below `starts`, where it is given.
    """

    def work(fd: int) -> None:
        lake.pretend()
        shim = recorder = None
        if starts is not None:
            shim = Shim(lake.path, Fault())
            recorder = Recorder(starts, ("process", "power"))
            recorder.watch(shim, 0, [])
        tell(fd, "different", check(lake.path, told, known, shim))
        for state in recorder.states if recorder else []:
            tell(fd, "state", state.call, state.name, state.tree)

    mine, status = fork(work)
    wrong = failure(mine, status)
    done.lakes += 1
    done.different += wrong is not None or mine[0][1]
    return wrong, [rest for kind, *rest in mine if kind == "state"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Killed:
    """A state that a kill leaves, and a kill while the next process starts on it."""

    run: Run
    state: State
    seed: int
    known: Known

    @property
    def kind(self) -> str:
        return self.state.name

    @property
    def where(self) -> Where:
        return self.state.station, max(1, self.state.at)

    def __call__(self) -> Outcome:
        done = Outcome()
        state, told = self.state, self.run.told[: self.state.told]
        with folder() as base:
            (base / "starts").mkdir()
            lake = Laid(stored(state.tree), base / "lake")
            wrong, again = checked(lake, told, self.known, done, base / "starts")
            done.add(state.name, f"{state.station}.{state.at} {state.call}", wrong)
            for call, name, tree in random.Random(f"{self.seed} {state.at}").sample(again, min(1, len(again))):
                wrong, _ = checked(Laid(stored(tree), base / "again"), told, self.known, done)
                done.add("kill while starting", f"{state.call}, then {name} at {call}", wrong)
        return done


@dataclass(frozen=True, slots=True, kw_only=True)
class Refused:
    """A call that fails, or a process that is really killed, in one life."""

    run: Run
    station: int
    fault: Fault
    known: Known

    def __call__(self) -> Outcome:
        done = Outcome()
        with folder() as base:
            lake = Laid(stored(self.run.begins[self.station]), base / "lake")

            def work(fd: int) -> None:
                lake.pretend()
                live(lake.path, self.station, self.fault, fd)

            mine, status = fork(work)
            kill = self.fault.kind == "kill"
            wrong = failure(mine, status) if status != (KILLED if kill else 0) else None
            if wrong is None and kill:
                wrong = self._other_than_recorded(read_tree(lake.path))
            if wrong is None:
                wrong, _ = checked(lake, [*self.run.told_before(self.station), *mine], self.known, done)
            done.add(self.kind, f"{self.station}.{self.fault.at} {self.call}", wrong)
        return done

    @property
    def kind(self) -> str:
        kind = self.fault.kind
        return "kill, for real" if kind == "kill" else f"{kind} from here on" if " " in kind or "-" in kind else kind

    @property
    def where(self) -> Where:
        return self.station, self.fault.at

    @property
    def call(self) -> str:
        """At what."""
        return self.run.calls[self.station][self.fault.at - 1]

    def _other_than_recorded(self, tree: Tree) -> str | None:
        """A kill leaves one of the states that were written down: so these are no invention."""
        known = {state.content for state in self.run.states if state.station == self.station}
        return None if digest(tree, index=False) in known else "left a lake that was not foreseen"
