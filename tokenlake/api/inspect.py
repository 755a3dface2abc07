"""`tokenlake inspect`: one rollout as a tree of calls, with the terminal chain marked and every reason said."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Mapping
from typing import Any

from tokenlake import sql
from tokenlake.api.call_tree import call_tree
from tokenlake.errors import NotFound
from tokenlake.ids import split_rollout_id
from tokenlake.store.reader import Lake

__all__ = ["inspect"]

Record = Mapping[str, Any]


def inspect(arguments: argparse.Namespace) -> int:
    """`tokenlake inspect`."""
    group_id, _ = split_rollout_id(arguments.rollout_id)
    lake = Lake(arguments.lake)
    try:
        found = lake.sql(sql.read("reads/inspect_rollout"), [arguments.rollout_id, group_id])
        rollouts = found.to_arrow_table().to_pylist()
        calls = lake.sql(sql.read("reads/inspect_calls"), [arguments.rollout_id]).to_arrow_table().to_pylist()
    finally:
        lake.close()
    if not rollouts:
        raise NotFound(f"no rollout {arguments.rollout_id} in {arguments.lake}")
    sys.stdout.write("\n".join([*_heading(rollouts[0]), *_attempts(rollouts[0], calls)]) + "\n")
    return 0


def _heading(rollout: Record) -> Iterator[str]:
    yield f"rollout   {rollout['rollout_id']} (group {rollout['group_id']}, {rollout['group_state']})"
    yield f"state     {rollout['state']}, attempt {rollout['attempt']}"
    reason = "" if rollout["reason"] is None else f" ({rollout['reason']})"
    yield f"verdict   {rollout['verdict']}{reason}"
    if rollout["detail"]:
        yield f"detail    {rollout['detail']}"
    yield f"reward    {'none' if rollout['reward'] is None else rollout['reward']}"
    terminal = rollout["terminal_call_id"]
    selection = rollout["terminal_selection"]
    yield f"terminal  {'none' if terminal is None else terminal}{f' ({selection})' if selection else ''}"


def _attempts(rollout: Record, calls: list[Record]) -> Iterator[str]:
    for attempt in sorted({call["attempt"] for call in calls}):
        mine = [call for call in calls if call["attempt"] == attempt]
        counts = "" if attempt == rollout["attempt"] else ", superseded"
        yield f"attempt {attempt}: {len(mine)} calls{counts}"
        for shown in call_tree(mine):
            yield _line(shown.call, shown.lane) + (" [in a cycle]" if shown.in_cycle else "")
    if not calls:
        yield "no calls"


def _line(call: Record, lane: int) -> str:
    mark = "*" if call["position"] is not None else "-"
    if call["status"] != "committed":
        return f"  {'  ' * lane}{mark} {call['call_id']}  {call['status']}: {call['reason']}"
    start, end = call["weight_version"], call["weight_version_end"]
    version = "?" if start is None else str(start) if start == end else f"{start}..{'?' if end is None else end}"
    words = [
        call["mode"],
        f"{call['prev_len']}+{call['delta_len']}={call['cum_len']} tokens",
        f"{call['sampled_tokens']} sampled",
        f"weights {version}",
    ]
    if call["finish_reason"] is not None:
        words.append(call["finish_reason"])
    if call["reason"] is not None:
        words.append(f"root: {call['reason']}")
    if call["ok"] is False:
        words.append(f"FAULT {call['fault']}")
    return f"  {'  ' * lane}{mark} {call['call_id']}  {', '.join(words)}"
