"""What other systems write, as the records of an import file.

`nemo-gym`: the `<rollout>.tokens.jsonl` files of NeMo-Gym's token capture, one or a folder of them; a line is a
`TokenEntry`. Rewards are not in them. `traces`: a JSON line for each sample, with the prompt's and the response's ids,
as verl and Agent Lightning style pipelines dump them.

What is converted goes through the same checks as an import file; nothing here decides whether a record is true, except
where the source carries evidence that the lake has no place for: a digest, a mark of a lost call.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, cast

from tokenlake.errors import ImportRefused, InvalidInput
from tokenlake.ids import split_rollout_id
from tokenlake.ingest.nemo_gym.carrier import lake_place
from tokenlake.ingest.nemo_gym.digests import entry_digest

__all__ = ["SOURCES", "Fields"]

Fields = tuple[int, dict[str, Any]]
"""The line that a record comes from, and the record as an import file would have it."""

_ROLLOUT = re.compile(r"(?P<group>.+)_g(?P<index>0|[1-9][0-9]{0,6})")
_SUFFIX = ".tokens.jsonl"


def _lines(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                if line.strip():
                    yield number, _object(line, number)
    except OSError as error:
        raise InvalidInput(f"cannot read {path}: {error.strerror}", path=str(path)) from error


def _object(line: bytes, number: int) -> dict[str, Any]:
    try:
        found = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ImportRefused(f"line {number}: not valid JSON; nothing was imported", line=number) from error
    if not isinstance(found, dict):
        raise ImportRefused(f"line {number}: a line must be a JSON object; nothing was imported", line=number)
    return cast("dict[str, Any]", found)


def _place(name: object, number: int) -> tuple[str, int]:
    """(group, index) that a rollout's name says; a name of another form is a group of one."""
    text = _text(name, number)
    match = _ROLLOUT.fullmatch(text)
    return (text, 0) if match is None else (match["group"], int(match["index"]))


def _text(name: object, number: int) -> str:
    if not isinstance(name, str) or not name:
        raise ImportRefused(f"line {number}: rollout_id must be a text; nothing was imported", line=number)
    return name


def _groups(places: Mapping[str, int], lines: Mapping[str, int]) -> Iterator[Fields]:
    for group_id, last in places.items():
        yield lines[group_id], {"type": "group", "group_id": group_id, "n": last + 1}


# ---------------------------------------------------------------- NeMo-Gym


def _nemo_gym(path: Path) -> Iterator[Fields]:
    files = sorted(path.glob(f"*{_SUFFIX}")) if path.is_dir() else [path]
    if not files:
        raise InvalidInput(f"no *{_SUFFIX} in {path}", path=str(path))
    places: dict[str, int] = {}
    lines: dict[str, int] = {}
    for file in files:
        for number, entry in _lines(file):
            group_id, index = split_rollout_id(_gym_place(entry.get("rollout_id"), number)[0])
            places[group_id] = max(index, places.get(group_id, 0))
            lines.setdefault(group_id, number)
    yield from _groups(places, lines)
    for file in files:
        yield from _rollouts(file)


def _gym_place(name: object, number: int) -> tuple[str, int]:
    """(rollout id, attempt) of a rollout that NeMo-Gym names so."""
    try:
        return lake_place(_text(name, number))
    except InvalidInput as error:
        raise ImportRefused(f"line {number}: {error.message}; nothing was imported", line=number) from error


def _rollouts(file: Path) -> Iterator[Fields]:
    """The calls of a file, and the end of each rollout that the capture itself gave up."""
    lost: dict[tuple[str, int], tuple[int, str]] = {}
    for number, entry in _lines(file):
        place = _gym_place(entry.get("rollout_id"), number)
        why = _fault(entry, number)
        if why is not None:
            lost.setdefault(place, (number, why))
        if file.with_name(file.name.removesuffix(".jsonl") + ".incomplete").exists():
            lost.setdefault(place, (number, "incomplete"))
        yield number, _nemo_gym_call(entry, *place)
    for (rollout, attempt), (number, why) in lost.items():
        yield number, {"type": "fail", "rollout_id": rollout, "attempt": attempt, "reason": why}


def _nemo_gym_call(entry: Mapping[str, Any], rollout: str, attempt: int) -> dict[str, Any]:
    routed = entry.get("routed_experts")
    call: dict[str, Any] = {
        "type": "call",
        "rollout_id": rollout,
        "attempt": attempt,
        "call_id": entry.get("model_call_id"),
        "generation_token_ids": entry.get("generation_token_ids"),
        "generation_logprobs": entry.get("generation_log_probs"),
        "response_id": entry.get("response_id"),
    }
    call["prompt_suffix_token_ids" if entry.get("prompt_is_delta") else "prompt_token_ids"] = entry.get(
        "prompt_token_ids"
    )
    if entry.get("parent_call_id") is not None or entry.get("parent_resolution") == "root":
        call["parent_call_id"] = entry.get("parent_call_id")
    if isinstance(entry.get("weight_version"), int):
        call["weight_version"] = entry["weight_version"]
    if routed is not None:
        call["extras"] = {"routed_experts": routed}
    return call


def _fault(entry: Mapping[str, Any], number: int) -> str | None:
    """Why the source itself does not stand behind an entry. Raises `ImportRefused` for a newer schema."""
    version = entry.get("schema_version", 1)
    if version != 1:
        raise ImportRefused(
            f"line {number}: a token entry of schema {version}, this Tokenlake reads 1; nothing was imported",
            line=number,
        )
    if entry.get("parent_resolution") == "unresolved":
        return "unresolved_parent"
    digest = entry.get("digest")
    if digest is None or entry.get("prompt_is_delta"):
        return None
    return None if digest == _entry_digest(entry) else "digest_mismatch"


def _entry_digest(entry: Mapping[str, Any]) -> str | None:
    try:
        return entry_digest([*entry["prompt_token_ids"], *entry["generation_token_ids"]])
    except (KeyError, TypeError, ValueError, OverflowError, InvalidInput):
        return None


# ---------------------------------------------------------------- traces

_NAMES: dict[str, tuple[str, ...]] = {
    "group_id": ("group_id", "uid"),
    "rollout_id": ("rollout_id",),
    "prompt": ("prompt_token_ids", "prompt_ids", "prompts"),
    "response": ("response_token_ids", "response_ids", "responses"),
    "logprobs": ("response_logprobs", "rollout_log_probs", "logprobs"),
    "reward": ("reward", "final_reward", "score"),
    "weight_version": ("weight_version", "model_version"),
    "response_id": ("response_id",),
}
"""What a trace may call a field; the first one that is there counts."""


def _traces(path: Path) -> Iterator[Fields]:
    """Traces of one rollout, in order, are its calls; the last one's reward is the rollout's."""
    places: dict[str, int] = {}
    lines: dict[str, int] = {}
    known: dict[tuple[str, str], int] = {}
    named: dict[int, str] = {}
    for number, trace in _lines(path):
        group_id, index = _trace_place(trace, number, places, known)
        places[group_id] = max(index, places.get(group_id, 0))
        lines.setdefault(group_id, number)
        named[number] = f"{group_id}_g{index}"
    yield from _groups(places, lines)
    turns: dict[str, int] = {}
    rewards: dict[str, tuple[int, Any]] = {}
    for number, trace in _lines(path):
        rollout = named[number]
        turn = turns[rollout] = turns.get(rollout, -1) + 1
        yield (
            number,
            {
                "type": "call",
                "rollout_id": rollout,
                "call_id": f"t{turn:06d}",
                "prompt_token_ids": _value(trace, "prompt"),
                "generation_token_ids": _value(trace, "response"),
                "generation_logprobs": _value(trace, "logprobs"),
                "weight_version": _value(trace, "weight_version"),
                "response_id": _value(trace, "response_id"),
            },
        )
        if _value(trace, "reward") is not None:
            rewards[rollout] = (number, _value(trace, "reward"))
    for rollout, (number, reward) in rewards.items():
        last = f"t{turns[rollout]:06d}"
        yield number, {"type": "seal", "rollout_id": rollout, "reward": reward, "terminal_call_id": last}


def _trace_place(
    trace: Mapping[str, Any], number: int, places: Mapping[str, int], known: dict[tuple[str, str], int]
) -> tuple[str, int]:
    """(group, index) of a trace; `known` are the places of rollouts whose names do not say them."""
    rollout, group = _value(trace, "rollout_id"), _value(trace, "group_id")
    if rollout is None and group is None:
        raise ImportRefused(f"line {number}: a trace needs rollout_id or group_id; nothing was imported", line=number)
    if group is None:
        return _place(rollout, number)
    group_id = str(group)
    following = places.get(group_id, -1) + 1
    if rollout is None:
        return group_id, following
    said = _place(rollout, number)
    return said if said[0] == group_id else (group_id, known.setdefault((group_id, rollout), following))


def _value(trace: Mapping[str, Any], what: str) -> Any:
    return next((trace[name] for name in _NAMES[what] if trace.get(name) is not None), None)


SOURCES: dict[str, Callable[[Path], Iterator[Fields]]] = {"nemo-gym": _nemo_gym, "traces": _traces}
"""Converters by the name of `tokenlake import --from`."""
