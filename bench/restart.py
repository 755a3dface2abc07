"""How long a gate takes from start to ready: open rollouts that it has to know again, beside closed history.

The lake is written through the capture core and the lineage log, as a gate would have left it: groups of eight rollouts
of four calls each. Closed groups are sealed, then given up, so that no time goes into rows that nobody reads here.
"""

from __future__ import annotations

import argparse
import json
import secrets
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.stub_engine import StubEngine
from tokenlake.api.service import Service
from tokenlake.api.settings import Environment
from tokenlake.ids import mint_call_id, rollout_id
from tokenlake.ingest.capture import CaptureCore, ParentLink
from tokenlake.ingest.coords import Coords
from tokenlake.ingest.engine import Engine
from tokenlake.store.lake import OwnedLake

__all__ = ["Start", "fill", "measure"]

_N = 8
_CALLS = 4
_EVENTS_AT_ONCE = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """One start of a service."""

    lake_s: float
    """Seconds to open the lake."""
    service_s: float
    """Seconds to make the service: the fold of open groups."""
    rollouts: int
    """Open rollouts it knows."""


def fill(lake: OwnedLake, rollouts: int, *, closed: bool, tag: str, tokens: int = 8) -> None:
    """Add groups of eight rollouts of four calls, each of which samples `tokens`."""
    core = CaptureCore(lake.delta_writer("embedded"))
    batch: list[dict[str, Any]] = []
    for number in range(rollouts // _N):
        batch += _group(core, f"{tag}{number}", tokens, closed=closed)
        if len(batch) >= _EVENTS_AT_ONCE:
            lake.lineage.append_many(batch)
            batch.clear()
    lake.lineage.append_many(batch)


def _group(core: CaptureCore, group_id: str, tokens: int, *, closed: bool) -> Iterator[dict[str, Any]]:
    yield {"event_type": "group_registered", "group_id": group_id, "n": _N, "purpose": "train"}
    names = [rollout_id(group_id, index) for index in range(_N)]
    for name in names:
        yield {"event_type": "rollout_registered", "group_id": group_id, "rollout_id": name, "attempt": 0}
    for name in names:
        last = None
        for turn in range(_CALLS):
            last = _call(core, name, tokens, last)
            yield _committed(group_id, turn, last)
        if closed and last is not None:
            yield {
                "event_type": "rollout_sealed",
                "group_id": group_id,
                "rollout_id": name,
                "attempt": 0,
                "reward": 1.0,
                "terminal_call_id": last.call_id,
                "terminal_selection": "only_leaf",
                "detail": json.dumps({"request": secrets.token_hex(32), "calls": _CALLS}),
            }
    if closed:
        yield {"event_type": "group_dropped", "group_id": group_id, "n": _N, "reason": "aborted"}


def _call(core: CaptureCore, name: str, tokens: int, last: Coords | None) -> Coords:
    parent = None
    if last is not None and last.chain_hash is not None:
        parent = ParentLink(
            call_id=last.call_id,
            root_call_id=last.root_call_id,
            depth=last.depth,
            cum_len=last.cum_len,
            chain_hash=last.chain_hash,
        )
    ticket = core.begin(rollout_id=name, attempt=0, call_id=mint_call_id(), parent=parent)
    return core.complete(
        ticket,
        prompt_token_ids=range((0 if last is None else last.cum_len) + 8),
        token_ids=range(tokens),
        logprobs=[-0.5] * tokens,
        finish_reason="stop",
        weight_version=1,
        weight_version_end=1,
    )


def _committed(group_id: str, turn: int, coords: Coords) -> dict[str, Any]:
    detail = {"preamble": secrets.token_hex(32), "turns": 2 * turn + 2}
    return coords.columns() | {
        "event_type": "call_committed",
        "group_id": group_id,
        "reason": "no_history" if turn == 0 else None,
        "response_id": f"chatcmpl-{coords.call_id}",
        "dialect": "chat",
        "fingerprint": secrets.token_bytes(32),
        "context_digest": secrets.token_bytes(32),
        "request_digest": secrets.token_bytes(32),
        "served_text": "eight tokens of text",
        "detail": json.dumps(detail),
    }


def measure(path: Path, engine: Engine) -> Start:
    """Start a service over a lake, as far as it needs no socket."""
    environment = Environment(token="t", token_given=True, capability_key="ab" * 32, state_dir=path)
    began = time.monotonic()
    with OwnedLake.open(path) as lake:
        opened = time.monotonic()
        service = Service(lake, engine, environment=environment)
        made = time.monotonic()
        rollouts = sum(len(group.rollouts) for group in service.control.groups.values() if group.state == "open")
        return Start(lake_s=opened - began, service_s=made - opened, rollouts=rollouts)


def main() -> None:
    """Print the time to start beside growing history."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--open", type=int, default=1000, help="open rollouts")
    parser.add_argument("--closed", type=int, nargs="+", default=[0, 1000, 10_000, 100_000], help="closed rollouts")
    parser.add_argument("--dir", type=Path, default=None, help="where to write (default: a temporary folder)")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=arguments.dir) as folder:
        for closed in arguments.closed:
            path = Path(folder) / str(closed)
            began = time.monotonic()
            with OwnedLake.open(path) as lake:
                fill(lake, closed, closed=True, tag="c")
                fill(lake, arguments.open, closed=False, tag="o")
            filled = time.monotonic() - began
            for _ in range(2):
                start = measure(path, StubEngine())
                print(
                    f"{closed:>9} closed  {start.rollouts:>6} open  lake {start.lake_s:7.3f} s  "
                    f"service {start.service_s:7.3f} s  (filled in {filled:.0f} s)"
                )


if __name__ == "__main__":
    main()
