"""Every byte at which the last append can tear, with every kind of tail that a file system may leave behind it.

These go through the store's own doors, below DuckDB: opening the log or the writer recovers it, and it goes on.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from functools import cache
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any

import pyarrow as pa

from tests.crash.laid import Laid
from tests.crash.scenario import record
from tests.crash.shim import File, Tree
from tests.crash.states import Run, State, stored
from tests.crash.trials import Outcome, Trial, Where, folder
from tokenlake.store.delta import Delta
from tokenlake.store.deltas import DeltaWriter
from tokenlake.store.digest import event_hash
from tokenlake.store.lineage import LineageLog, lineage_loss
from tokenlake.store.rowfile import RowWriter
from tokenlake.store.schema import ROW

TAILS = ("nothing", "zeros", "noise", "ones")
_CHUNK = 32
_MOST = 12 << 10
"""Bytes of the append: each of them is tried with every tail."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Torn:
    """Some bytes of one append."""

    what: str
    before: str
    """The lake before the append."""
    path: str
    whole: bytes
    """The file after it, up to the end of the append."""
    start: int
    """Where the append begins."""
    first: int
    last: int
    tail: str

    @property
    def kind(self) -> str:
        return f"torn {self.what}, then {self.tail}"

    @property
    def where(self) -> Where:
        return None

    def __call__(self) -> Outcome:
        done = Outcome()
        place = self.path.rsplit("/", 1)[0]
        tree = {name: data for name, data in stored(self.before).items() if name.startswith(place)}
        goes_on = {"delta": _deltas, "events": _lineage, "rows": _rows}[self.what]
        for cut in range(self.first, self.last):
            with folder() as base:
                torn = self.whole[:cut] + self._garbage(len(self.whole) - cut)
                wrong = None
                try:
                    Laid({**tree, self.path: File(torn, 0)}, base)
                    goes_on(base, tree, cut == len(self.whole))
                except AssertionError as error:
                    wrong = str(error) or "asserts"
                done.add(self.kind, f"byte {cut - self.start} of {self.path}", wrong)
        return done

    def _garbage(self, size: int) -> bytes:
        if self.tail == "noise":
            return random.Random(size).randbytes(size)
        return {"nothing": b"", "zeros": bytes(size), "ones": b"\xff" * size}[self.tail]


def torn_trials(run: Run) -> list[Trial]:
    """The last append of each kind of file in the first lives, byte by byte."""
    trials: list[Trial] = []
    for what, call in (("delta", "pwrite /deltas/w0/"), ("events", "pwrite /lineage/gate/"), ("rows", "write /rows/")):
        states = [state for state in run.states if state.name == "kill, process" and state.station < 2]
        before, after = _last_append(states, call)
        path = before.call.split("/", 1)[1]
        whole, start = _appended(before, after, path)
        for tail in TAILS:
            for first in range(start, len(whole) + 1, _CHUNK):
                last = min(first + _CHUNK, len(whole) + 1)
                trials.append(
                    Torn(
                        what=what,
                        before=before.tree,
                        path=path,
                        whole=whole,
                        start=start,
                        first=first,
                        last=last,
                        tail=tail,
                    )
                )
    return trials


def _last_append(states: list[State], call: str) -> tuple[State, State]:
    """The states around the last append to such a file that is largest of those of up to `_MOST` bytes.

    Over zeros it takes several calls.
    """
    runs = [list(run) for _, run in groupby(states, key=lambda s: (s.call, s.call.startswith("p") or s.at))]
    appends = [(run[0], after[0]) for run, after in pairwise(runs) if run[0].call.startswith(call)]
    sizes = [_grown(*append) for append in appends]
    _, at = max((size, at) for at, size in enumerate(sizes) if size <= _MOST)
    return appends[at]


def _grown(before: State, after: State) -> int:
    whole, start = _appended(before, after, before.call.split("/", 1)[1])
    return len(whole) - start


def _appended(before: State, after: State, path: str) -> tuple[bytes, int]:
    """A file up to the end of what was appended, and where that begins; zeros may lie ahead of it."""
    known, whole = _bytes(before, path), _bytes(after, path)
    start = next((i for i, (a, b) in enumerate(zip(known, whole, strict=False)) if a != b), len(known))
    return whole[: -(-len(whole.rstrip(bytes(1))) // 8) * 8], start


def _bytes(state: State, path: str) -> bytes:
    file = stored(state.tree).get(path)
    return b"" if file is None else file.data


def _deltas(root: Path, tree: Tree, whole: bool) -> None:
    """What was acknowledged is there; what tore is absent or, with a tail in its place, at least never believed."""
    names = ("c00", "c01", "c02")
    held = b"".join(file.data for file in tree.values() if file)
    writer = DeltaWriter(root, "w0")
    for name in [name for name in names if _delta(name).digest in held]:
        found = writer.find(f"g0_g{int(name[2]) % 2}", 0, name)
        assert found is not None, f"{name} was acknowledged and is lost"
        assert writer.read(found[0]).token_ids == _delta(name).token_ids, f"{name} is another one"
    for name in names:
        kept = writer.read(writer.stage(_delta(name)))
        assert (kept.digest, kept.token_ids, kept.token_mask, kept.logprobs) == _content(name), f"{name} is half there"
    writer.close()


@cache
def _delta(name: str) -> Delta:
    return record(name)[0]


def _content(name: str) -> tuple[Any, ...]:
    delta = _delta(name)
    return delta.digest, delta.token_ids, delta.token_mask, delta.logprobs


def _lineage(root: Path, tree: Tree, whole: bool) -> None:
    log = LineageLog(root, "gate")
    before = [(event["event_seq"], event["event_hash"]) for event in log.events()]
    for event in log.events():
        bound = {name: value for name, value in event.items() if name not in ("prev_hash", "event_hash")}
        assert event_hash(event["prev_hash"], bound) == event["event_hash"], "an event is half there"
    added = log.append("policy_set", detail="{}")
    log.close()
    again = LineageLog(root, "gate")
    after = [(event["event_seq"], event["event_hash"]) for event in again.events()]
    again.close()
    assert after == [*before, (added["event_seq"], added["event_hash"])], "the log did not go on where it was"
    assert added["event_seq"] == len(before)
    assert lineage_loss(root) == [], "an event is lost"


def _rows(root: Path, tree: Tree, whole: bool) -> None:
    writer = RowWriter(root / "rows")
    assert writer.write(pa.Table.from_batches([], ROW)) == 0
    assert [path.name for path in (root / "rows").iterdir()] == ["000000.arrow"], "what was torn is still there"
