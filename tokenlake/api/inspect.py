"""`tokenlake inspect`: one rollout as a tree of calls, with the terminal chain marked and every reason said."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Mapping
from typing import Any

from tokenlake import sql
from tokenlake.api.call_tree import call_tree
from tokenlake.api.console.strip import LEVELS, token_strip
from tokenlake.api.paint import Paint
from tokenlake.errors import NotFound
from tokenlake.ids import split_rollout_id
from tokenlake.store.reader import Lake

__all__ = ["inspect"]

Record = Mapping[str, Any]

_VERDICTS = {"valid": "green", "placeholder": "red", "open": "yellow"}
_LEVELS = "▁▂▃▄▅▆▇"
"""How sure the model was of a sampled token, where there is no colour: one for each level of `LEVELS`."""


def inspect(arguments: argparse.Namespace) -> int:
    """`tokenlake inspect`."""
    group_id, _ = split_rollout_id(arguments.rollout_id)
    paint = Paint(sys.stdout)
    lake = Lake(arguments.lake)
    try:
        found = lake.sql(sql.read("reads/inspect_rollout"), [arguments.rollout_id, group_id])
        rollouts = found.to_arrow_table().to_pylist()
        calls = lake.sql(sql.read("reads/inspect_calls"), [arguments.rollout_id]).to_arrow_table().to_pylist()
        wanted = [group_id, arguments.rollout_id, 0, arguments.tokens]
        tokens: list[Any] = []
        if arguments.tokens:
            tokens = lake.sql(sql.read("console/tokens"), wanted).to_arrow_table().to_pylist()
    finally:
        lake.close()
    if not rollouts:
        raise NotFound(f"no rollout {arguments.rollout_id} in {arguments.lake}")
    lines = [*_heading(rollouts[0], paint), *_attempts(rollouts[0], calls, paint), *_strip(tokens, paint)]
    sys.stdout.write("\n".join(lines) + "\n")
    return 0


def _heading(rollout: Record, paint: Paint) -> Iterator[str]:
    name = paint(rollout["rollout_id"], "bold")
    yield f"rollout   {name} (group {rollout['group_id']}, {rollout['group_state']})"
    yield f"state     {rollout['state']}, attempt {rollout['attempt']}"
    reason = "" if rollout["reason"] is None else f" ({rollout['reason']})"
    yield f"verdict   {paint(rollout['verdict'] + reason, 'bold', _VERDICTS.get(rollout['verdict'], 'yellow'))}"
    if rollout["detail"] not in (None, rollout["reason"]):
        yield f"detail    {rollout['detail']}"
    yield f"reward    {'none' if rollout['reward'] is None else rollout['reward']}"
    terminal = rollout["terminal_call_id"]
    selection = rollout["terminal_selection"]
    yield f"terminal  {'none' if terminal is None else terminal}{f' ({selection})' if selection else ''}"
    if terminal is not None:
        yield f"weights   {_versions(rollout['weight_version_min'], rollout['weight_version_max'])}"


def _versions(first: int | None, last: int | None) -> str:
    """A range of weight versions; what nobody knows is a question mark."""
    if first is None and last is None:
        return "?"
    return str(first) if first == last else f"{'?' if first is None else first}..{'?' if last is None else last}"


def _attempts(rollout: Record, calls: list[Record], paint: Paint) -> Iterator[str]:
    for attempt in sorted({call["attempt"] for call in calls}):
        mine = [call for call in calls if call["attempt"] == attempt]
        counts = f"{len(mine)} call{'' if len(mine) == 1 else 's'}"
        note = " (* leads to the terminal)" if attempt == rollout["attempt"] else ", superseded"
        yield paint(f"attempt {attempt}: {counts}", "bold") + note
        for shown in call_tree(mine):
            cycle = paint(" [in a cycle]", "red") if shown.in_cycle else ""
            yield _line(shown.call, shown.lane, paint) + cycle
    if not calls:
        yield "no calls"


def _line(call: Record, lane: int, paint: Paint) -> str:
    on_chain = call["position"] is not None
    lead = f"  {'  ' * max(lane - 1, 0)}{'└─ ' if lane else ''}"
    name = paint(f"* {call['call_id']}", "green", "bold") if on_chain else f"- {call['call_id']}"
    if call["status"] != "committed":
        return f"{lead}{name}  " + paint(f"{call['status']}: {call['reason']}", "red")
    words = [
        call["mode"],
        f"{call['prev_len']}+{call['delta_len']}={call['cum_len']} tokens",
        f"{call['sampled_tokens']} sampled",
        f"weights {_versions(call['weight_version'], call['weight_version_end'])}",
    ]
    if call["finish_reason"] is not None:
        words.append(call["finish_reason"])
    if call["reason"] is not None:
        words.append(paint(f"root: {call['reason']}", "yellow"))
    if call["ok"] is False:
        words.append(paint(f"FAULT {call['fault']}", "red", "bold"))
    return f"{lead}{name}  {', '.join(words)}"


def _strip(records: list[Record], paint: Paint) -> Iterator[str]:
    """The ids of the terminal chain: carried ones dim, sampled ones shaded by how sure the model was."""
    if not records:
        return
    yield paint("tokens", "bold") + f" (carried, or sampled: {_legend(paint)} surer)"
    for call in token_strip(records, str):
        yield f"  {call.call_id}  " + paint.wrapped([_token(token.text, token.css, paint) for token in call.tokens], 4)


def _token(text: str, css: str, paint: Paint) -> str:
    if not css.startswith("s "):
        return paint(text, "dim")
    level = int(css.removeprefix("s l"))
    return paint.shade(text, level, len(_LEVELS)) if paint.on else text + _LEVELS[level]


def _legend(paint: Paint) -> str:
    return "".join(paint.shade(mark, level, len(_LEVELS)) for level, mark in enumerate(_LEVELS[: len(LEVELS) + 1]))
