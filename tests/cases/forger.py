"""Writes a lake's files anew, with other records: what damage or a forger does to bytes on disk."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa

from tests.sql.records import BOUND, raw
from tokenlake.store.batchfile import write_batches
from tokenlake.store.digest import ZERO_HASH, delta_digest, event_hash, row_digest
from tokenlake.store.footer import blocks_of
from tokenlake.store.lineage import read_events
from tokenlake.store.schema import DELTA, LINEAGE, ROW

Record = dict[str, Any]
SAMPLING = ("temperature", "top_p", "top_k", "logprob_mode")


def one(found: Any) -> Path:
    """The only path of a pattern."""
    (path,) = found
    return path


def flip(path: Path, old: bytes, new: bytes | None = None, *, which: int = 0) -> None:
    """Change bytes in place: `old`, met for the `which`-th time, becomes `new`, or has one bit turned."""
    data = bytearray(path.read_bytes())
    at = -1
    for _ in range(which + 1):
        at = data.index(old, at + 1)
    data[at : at + len(old)] = new if new is not None else bytes([old[0] ^ 1]) + old[1:]
    path.write_bytes(data)


def messages(path: Path) -> list[tuple[int, int]]:
    """(start, end) of every record batch of a sealed segment."""
    return [(offset, offset + meta + body) for offset, meta, body in blocks_of(memoryview(path.read_bytes()))]


def rewrite(path: Path, schema: pa.Schema, edit: Callable[[list[Record]], list[Record] | None]) -> None:
    """Replace a segment by one with the edited records, a batch each."""
    records = pa.ipc.open_file(path).read_all().to_pylist()
    edited = edit(records)
    records = records if edited is None else edited
    write_batches(path, schema, (pa.RecordBatch.from_pylist([record], schema=schema) for record in records))


def deltas(path: Path, edit: Callable[[dict[str, Record]], Any], *, redigest: bool = False) -> None:
    """Edit the deltas of a lake by `rollout/call`; with `redigest` each says what it holds."""

    def edited(records: list[Record]) -> list[Record]:
        named = {f"{record['rollout_id']}/{record['call_id']}": record for record in records}
        edit(named)
        return [with_digest(record) if redigest else record for record in named.values()]

    rewrite(one(path.glob("deltas/*/*.arrow")), DELTA, edited)


def with_digest(record: Record) -> Record:
    """A delta whose digest is that of what it holds."""
    sampling = record["sampling"]
    arrays = {"token_ids": "i", "token_mask": "B", "logprobs": "f"}
    return record | {
        "digest": delta_digest(
            **{name: record[name] for name in BOUND},
            sampling=None if sampling is None else tuple(sampling[name] for name in SAMPLING),
            **{name: raw(code, record[name]) for name, code in arrays.items()},
        )
    }


def rows(path: Path, edit: Callable[[list[Record]], list[Record] | None], *, redigest: bool = False) -> None:
    """Edit the published rows of a lake's first file."""

    def edited(records: list[Record]) -> list[Record]:
        made = edit(records)
        made = records if made is None else made
        return [_row_digest(row) if redigest else row for row in made]

    rewrite(min(path.glob("rows/*.arrow")), ROW, edited)


def _row_digest(row: Record) -> Record:
    content = {name: value for name, value in row.items() if name not in ("published_at", "row_digest")}
    content |= {name: raw("i", row[name]) for name in ("prompt_ids_for_adv", "input_ids")}
    content |= {"token_mask": raw("B", row["token_mask"]), "logprobs": raw("f", row["logprobs"])}
    return row | {"row_digest": row_digest(**content)}


def lineage(path: Path, edit: Callable[[list[Record]], list[Record] | None], *, rehash: bool = False) -> None:
    """Edit the events of a lake; with `rehash` they are one sound chain again, and the anchor names its end."""
    folder = one(p for p in path.glob("lineage/*") if p.is_dir())
    events = list(read_events(path, folder.name))
    edited = edit(events)
    events = events if edited is None else edited
    if rehash:
        head = ZERO_HASH
        for seq, event in enumerate(events):
            bound = {name: value for name, value in event.items() if name not in ("prev_hash", "event_hash")}
            event |= {"event_seq": seq, "prev_hash": head}
            head = event["event_hash"] = event_hash(head, bound | {"event_seq": seq})
        (folder / "head.json").write_text(f'{{"event_seq": {len(events) - 1}, "event_hash": "{head.hex()}"}}')
    first, *others = sorted(folder.glob("*.arrow"))
    for other in others:
        other.unlink()
    write_batches(first, LINEAGE, (pa.RecordBatch.from_pylist([event], schema=LINEAGE) for event in events))


def event(events: list[Record], event_type: str, **where: Any) -> Record:
    """The first event of a type with these columns."""
    return next(e for e in events if e["event_type"] == event_type and where.items() <= e.items())
