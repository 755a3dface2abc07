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

from tests.crash.child import fork
from tests.crash.scenario import STATIONS, Child, Told
from tests.crash.shim import MODES, Fault, File, Shim, Tree, read_tree


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
    content: str
    """The digest of it without its index."""
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
        self._files: dict[str, File] = {}

    def watch(self, shim: Shim, station: int, told: Told) -> None:
        """Record before each call of a shim from now on."""

        def before(name: str, path: str, data: bytes | None, offset: int | None) -> None:
            at = len(shim.calls) + 1
            present = read_tree(Path(shim.root))
            for mode in self._modes:
                tree = shim.left(mode, present)
                self.keep(f"kill, {mode}", tree, station, at, f"{name} /{path}", len(told))
                if data and mode == "process":
                    self._torn(tree, path, data, offset, station, at, len(told))

        shim.watch = before

    def keep(self, name: str, tree: Tree, station: int, at: int, call: str, told: int) -> str:
        """Keep a state unless the same lake is there already, after as much was acknowledged."""
        self.tried[name] += 1
        tree = {path: self._once(path, file) for path, file in tree.items()}
        kept = self._folder / f"{digest(tree)}-{told}.json"
        if kept.name not in self._seen:
            self._seen.add(kept.name)
            listed = {path: file and [self._blob(file.data), file.inode] for path, file in tree.items()}
            kept.write_text(json.dumps(listed))
            content = digest(tree, index=False)
            self.states.append(
                State(name=name, station=station, at=at, call=call, tree=str(kept), content=content, told=told)
            )
        return str(kept)

    def _once(self, path: str, file: File | None) -> File | None:
        """The same object for the same bytes as before: so a file is hashed once."""
        if file is not None and self._files.get(path) != file:
            self._files[path] = file
        return file and self._files[path]

    def _blob(self, data: bytes) -> str:
        """Where bytes are kept, once."""
        kept = self._folder / _hash(data)
        if not kept.exists():
            kept.write_bytes(data)
        return str(kept)

    def _torn(self, tree: Tree, path: str, data: bytes, at_byte: int | None, station: int, at: int, told: int) -> None:
        """Some of a write; the torn trial takes each byte of some of them."""
        before = tree.get(path) or File(b"", 0)
        start = len(before.data) if at_byte is None else at_byte
        for size in sorted({1, at * 7919 % len(data), len(data) - 1}):
            written = before.data[:start] + data[:size] + before.data[start + size :]
            torn = {**tree, path: File(written, before.inode)}
            self.keep("torn write", torn, station, at, f"write {size} of {len(data)} /{path}", told)


def digest(tree: Tree, *, index: bool = True) -> str:
    """The content of a lake; locks are no content, and `index` is only sometimes."""
    names = [name for name in tree if not name.endswith(".lock") and (index or not name.startswith("index."))]
    parts = [f"{name} {'' if (file := tree[name]) is None else _hash(file.data)}" for name in sorted(names)]
    return sha256("\n".join(parts).encode()).hexdigest()


@lru_cache(maxsize=256)
def _hash(data: bytes) -> str:
    return sha256(data).hexdigest()


def stored(path: str) -> Tree:
    """A kept state."""
    listed: dict[str, tuple[str, int] | None] = json.loads(Path(path).read_bytes())
    return {name: kept and File(Path(kept[0]).read_bytes(), kept[1]) for name, kept in listed.items()}


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
