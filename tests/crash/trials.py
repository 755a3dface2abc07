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

from tests.crash.check import check, look
from tests.crash.child import failure, fork, live
from tests.crash.scenario import Told
from tests.crash.shim import KILLED, Fault, Tree, read_tree, write_tree
from tests.crash.states import Run, State, digest, starts, stored

PLACE = Path("/dev/shm")
"""In memory where there is such a place: what is tested is the order of calls, not a disk."""


@dataclass(slots=True)
class Outcome:
    """What some trials came to."""

    tried: Counter[str] = field(default_factory=Counter[str])
    broken: list[str] = field(default_factory=list[str])

    def add(self, name: str, what: str, wrong: str | None) -> None:
        """Count one trial, and keep why it failed."""
        self.tried[name] += 1
        if wrong is not None:
            self.broken.append(f"{name}, {what}: {wrong}")


@contextmanager
def folder() -> Generator[Path]:
    """A folder of a trial's own."""
    base = Path(tempfile.mkdtemp(prefix="tokenlake-crash-", dir=PLACE if PLACE.is_dir() else None))
    try:
        yield base
    finally:
        shutil.rmtree(base)


def new(tree: Tree, told: Told, seen: Path) -> bool:
    """Whether no process has checked this lake yet: another errno mostly leaves the same one."""
    kept = [each for each in told if each[0] != "refused"]
    try:
        (seen / f"{digest(tree, index=False)}-{len(kept)}").mkdir()
    except FileExistsError:
        return False
    return True


def checked(lake: Path, told: Told) -> str | None:
    """What is wrong with a lake, looked at by a process of its own."""
    return failure(*fork(lambda _: check(lake, told)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Killed:
    """A state that a kill leaves, and kills while the next process starts on it."""

    run: Run
    state: State
    seed: int

    def __call__(self) -> Outcome:
        done = Outcome()
        state, told = self.state, self.run.told[: self.state.told]
        with folder() as base:
            tree = stored(state.tree)
            write_tree(tree, base / "lake")
            what = f"{state.station}.{state.at} {state.call}"
            if state.name == "torn write":
                done.add(state.name, what, failure(*fork(lambda _: look(base / "lake", told))))
                return done
            done.add(state.name, what, checked(base / "lake", told))
            if not tree:
                return done
            write_tree(tree, base / "again")
            again = starts(base / "again", base / "starts")
            for second in random.Random(f"{self.seed} {state.at}").sample(again, min(1, len(again))):
                shutil.rmtree(base / "again")
                write_tree(stored(second.tree), base / "again")
                wrong = failure(*fork(lambda _: look(base / "again", told)))
                done.add("kill while starting", f"{state.call}, then {second.name} at {second.call}", wrong)
        return done


@dataclass(frozen=True, slots=True, kw_only=True)
class Refused:
    """A call that fails, or a process that is really killed, in one life."""

    run: Run
    station: int
    fault: Fault
    seen: Path

    def __call__(self) -> Outcome:
        done = Outcome()
        with folder() as base:
            lake = base / "lake"
            write_tree(stored(self.run.begins[self.station]), lake)
            mine, status = fork(lambda fd: live(lake, self.station, self.fault, fd))
            kill = self.fault.kind == "kill"
            wrong = failure(mine, status) if status != (KILLED if kill else 0) else None
            tree = read_tree(lake)
            told = [*self.run.told_before(self.station), *mine]
            if wrong is None and kill:
                wrong = self._other_than_recorded(tree)
            if wrong is None and new(tree, told, self.seen):
                wrong = checked(lake, told)
            done.add(self.name, f"{self.station}.{self.fault.at} {self.call}", wrong)
        return done

    @property
    def name(self) -> str:
        """As it is counted."""
        kind = self.fault.kind
        return "kill, for real" if kind == "kill" else f"{kind} from here on" if " " in kind or "-" in kind else kind

    @property
    def call(self) -> str:
        """At what."""
        return self.run.calls[self.station][self.fault.at - 1]

    def _other_than_recorded(self, tree: Tree) -> str | None:
        """A kill leaves one of the states that were written down: so these are no invention."""
        left = digest(tree, index=False)
        known = {digest(stored(state.tree), index=False) for state in self.run.states if state.station == self.station}
        return None if left in known else "left a lake that was not foreseen"
