"""What a kill can leave at each call that changes a file, taken from one run that nobody kills.

Before each call the run writes down what the disk holds, and what a loss of power, a torn write or a file system that
writes names before bytes would have made of it. Each different lake is kept once, with what was acknowledged so far.
"""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import asdict, dataclass
from functools import lru_cache
from hashlib import sha256
from pathlib import Path

from tests.crash.child import fork, tell
from tests.crash.scenario import STATIONS, Child, Told
from tests.crash.shim import MODES, Fault, Shim, Tree, read_tree
from tokenlake.store.lake import OwnedLake


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """One lake that a kill leaves."""

    name: str
    """How it came to be: `kill, power`."""
    station: int
    at: int
    call: str
    tree: str
    """The file that lists it."""
    told: int
    """How many lines were told until then."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """What a whole run showed."""

    told: Told
    states: list[State]
    calls: list[list[str]]
    """Of each station."""
    tried: Counter[str]
    """Kill points by the way to be killed; many of them leave the same lake."""
    begins: list[str]
    """The lake as each station finds it."""

    def told_before(self, station: int) -> Told:
        """What earlier stations acknowledged."""
        ends = [i for i, (kind, *_) in enumerate(self.told) if kind == "closed"]
        return self.told[: ends[station - 1] + 1] if station else []


class Recorder:
    """Keeps each different state once, below a folder."""

    def __init__(self, folder: Path, modes: tuple[str, ...] = MODES) -> None:
        self.states: list[State] = []
        self.tried = Counter[str]()
        self._folder = folder
        self._modes = modes
        self._seen: set[str] = set()
        self._files: dict[str, bytes] = {}

    def watch(self, shim: Shim, station: int, told: Told) -> None:
        """Record before each call of a shim from now on."""

        def before(name: str, path: str, data: bytes | None) -> None:
            at = len(shim.calls) + 1
            present = read_tree(Path(shim.root))
            for mode in self._modes:
                tree = shim.left(mode, present)
                self.keep(f"kill, {mode}", tree, station, at, f"{name} /{path}", len(told))
                if data and mode == "process":
                    self._torn(tree, path, data, station, at, len(told))

        shim.watch = before

    def keep(self, name: str, tree: Tree, station: int, at: int, call: str, told: int) -> str:
        """Keep a state unless the same lake is there already, after as much was acknowledged."""
        self.tried[name] += 1
        tree = {path: self._once(path, data) for path, data in tree.items()}
        kept = self._folder / f"{digest(tree)}-{told}.json"
        if kept.name not in self._seen:
            self._seen.add(kept.name)
            kept.write_text(json.dumps({path: self._blob(data) for path, data in tree.items()}))
            state = State(name=name, station=station, at=at, call=call, tree=str(kept), told=told)
            self.states.append(state)
        return str(kept)

    def _once(self, path: str, data: bytes | None) -> bytes | None:
        """The same object for the same bytes as before: so a file is hashed once."""
        if data is not None and self._files.get(path) != data:
            self._files[path] = data
        return None if data is None else self._files[path]

    def _blob(self, data: bytes | None) -> str | None:
        """Where bytes are kept, once."""
        if data is None:
            return None
        kept = self._folder / _hash(data)
        if not kept.exists():
            kept.write_bytes(data)
        return str(kept)

    def _torn(self, tree: Tree, path: str, data: bytes, station: int, at: int, told: int) -> None:
        """Some of a write; the torn trial takes each byte of some of them."""
        for size in sorted({1, at * 7919 % len(data), len(data) - 1}):
            torn = {**tree, path: (tree.get(path) or b"") + data[:size]}
            self.keep("torn write", torn, station, at, f"write {size} of {len(data)} /{path}", told)


def digest(tree: Tree, *, index: bool = True) -> str:
    """The content of a lake; locks are no content, and `index` is only sometimes."""
    names = [name for name in tree if not name.endswith(".lock") and (index or not name.startswith("index."))]
    parts = [f"{name} {'' if (data := tree[name]) is None else _hash(data)}" for name in sorted(names)]
    return sha256("\n".join(parts).encode()).hexdigest()


@lru_cache(maxsize=256)
def _hash(data: bytes) -> str:
    return sha256(data).hexdigest()


def stored(path: str) -> Tree:
    """A kept state."""
    names: dict[str, str | None] = json.loads(Path(path).read_bytes())
    return {name: None if kept is None else Path(kept).read_bytes() for name, kept in names.items()}


def record(base: Path) -> Run:
    """One run through all stations, below `base`."""
    kept = base / "states"
    kept.mkdir()

    def work(_: int) -> None:
        told: Told = []
        recorder = Recorder(kept)
        calls: list[list[str]] = []
        begins: list[str] = []
        for station in range(len(STATIONS)):
            shim = Shim(base / "lake", Fault())
            begins.append(recorder.keep("kill, process", read_tree(base / "lake"), station, 0, "closed", len(told)))
            recorder.watch(shim, station, told)
            shim.install()
            Child(base / "lake", lambda *each: told.append(json.loads(json.dumps(each))), station).run()
            shim.stop()
            calls.append(shim.calls)
        states = [asdict(state) for state in recorder.states]
        run = {"told": told, "states": states, "calls": calls, "tried": recorder.tried, "begins": begins}
        (base / "run.json").write_text(json.dumps(run))

    told, status = fork(work)
    if status:
        raise AssertionError(told[-1][-1])
    run = json.loads((base / "run.json").read_bytes())
    states = [State(**state) for state in run["states"]]
    return Run(**{**run, "states": states, "tried": Counter(run["tried"])})


def starts(path: Path, folder: Path) -> list[State]:
    """What a kill while a lake starts and stops again can leave, of a lake that is changed by it."""
    folder.mkdir()

    def work(fd: int) -> None:
        recorder = Recorder(folder, ("process", "power"))
        shim = Shim(path, Fault())
        recorder.watch(shim, 0, [])
        shim.install()
        OwnedLake.open(path).close()
        shim.stop()
        for state in recorder.states:
            tell(fd, "state", asdict(state))

    told, status = fork(work)
    if status:
        raise AssertionError(told[-1][-1])
    return [State(**state) for _, state in told]
