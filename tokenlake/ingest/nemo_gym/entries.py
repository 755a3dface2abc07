"""A token entry of NeMo-Gym as a delta, and back: every field as it was put, each token once."""

from __future__ import annotations

import base64
import json
from typing import Any

import numpy as np
from nemo_gym.token_id_capture.records import TokenEntry

from tokenlake.errors import InvalidInput
from tokenlake.ids import check_call_id
from tokenlake.ingest.coords import Coords
from tokenlake.ingest.nemo_gym import digests
from tokenlake.ingest.nemo_gym._extra import EXTRA
from tokenlake.ingest.nemo_gym.carrier import lake_place
from tokenlake.ingest.nemo_gym.writer import ENVELOPE, GymWriter, link_to
from tokenlake.store.delta import Delta

__all__ = ["EXTRA", "entry_of", "is_mark", "mark", "put_entry"]

_ARRAYS = {"prompt_token_ids", "generation_token_ids", "generation_log_probs"}
_DOUBLES = "generation_log_probs"
"""Log-probabilities that a float32 does not hold, as base64 of little-endian doubles."""


def put_entry(writer: GymWriter, entry: TokenEntry) -> Coords:
    """Stage an entry as what it adds to its parent; as a whole sequence where no parent is known to be its prefix."""
    rollout_id, attempt = lake_place(entry.rollout_id)
    prompt = np.asarray(entry.prompt_token_ids, np.int32)
    parent = None
    if entry.parent_call_id is not None:
        parent = writer.staged.find(rollout_id, attempt, entry.parent_call_id)
    if entry.prompt_is_delta:
        if parent is None:
            raise InvalidInput("the entry holds a suffix of its prompt, and its parent is not in this lake")
        prompt = np.concatenate([np.zeros(parent.cum_len, np.int32), prompt])
    elif parent is not None and not _begins_with(prompt, parent):
        parent = None
    core = writer.core
    ticket = core.begin(
        rollout_id=rollout_id,
        attempt=attempt,
        call_id=check_call_id(entry.model_call_id),
        parent=None if parent is None else link_to(parent),
    )
    version = (entry.model_extra or {}).get("weight_version")
    version = version if isinstance(version, int) else None
    return core.complete(
        ticket,
        prompt_token_ids=prompt.data,
        token_ids=np.asarray(entry.generation_token_ids, np.int32).data,
        logprobs=entry.generation_log_probs,
        finish_reason=None,
        weight_version=version,
        weight_version_end=version,
        extras={ENVELOPE: _envelope(entry)},
    )


def entry_of(delta: Delta, ancestors: dict[str, Delta]) -> TokenEntry:
    """The entry that was put; `ancestors` has the rollout's deltas by call id. Raises `InvalidInput` for another."""
    fields = _fields(delta)
    ids = _ids(delta)
    sampled = int(np.frombuffer(delta.token_mask or b"", np.uint8).sum())
    prompt = ids[: ids.size - sampled]
    if not fields["prompt_is_delta"]:
        prompt = np.concatenate([*_history(delta, ancestors), prompt])
    doubles = fields.pop(_DOUBLES, None)
    logprobs = (
        np.frombuffer(delta.logprobs or b"", np.float32)[ids.size - sampled :]
        if doubles is None
        else np.frombuffer(base64.b64decode(doubles), "<f8")
    )
    return TokenEntry(
        **fields,
        prompt_token_ids=prompt.tolist(),
        generation_token_ids=ids[ids.size - sampled :].tolist(),
        generation_log_probs=logprobs.tolist(),
    )


def mark(writer: GymWriter, name: str, what: str, call_id: str) -> Coords:
    """Stage a record of no tokens that says something of a call: `intent` or `incomplete`."""
    rollout_id, attempt = lake_place(name)
    core = writer.core
    ticket = core.begin(rollout_id=rollout_id, attempt=attempt, call_id=check_call_id(f"{what}:{call_id}"))
    return core.complete(
        ticket,
        prompt_token_ids=[],
        token_ids=[],
        logprobs=[],
        finish_reason=None,
        weight_version=None,
        weight_version_end=None,
        extras={ENVELOPE: {"mark": what, "call": call_id}},
    )


def is_mark(delta: Delta) -> tuple[str, str] | None:
    """(what, call id) of a mark; None for an entry."""
    envelope = json.loads(delta.extras or "{}").get(ENVELOPE, {})
    return (envelope["mark"], envelope["call"]) if "mark" in envelope else None


def _envelope(entry: TokenEntry) -> dict[str, Any]:
    fields = entry.model_dump(mode="json", exclude=_ARRAYS)
    doubles = np.asarray(entry.generation_log_probs, "<f8")
    with np.errstate(over="ignore"):
        exact = (doubles.astype(np.float32).astype(np.float64) == doubles).all()
    if not exact:
        fields[_DOUBLES] = base64.b64encode(doubles.tobytes()).decode()
    return {"entry": fields}


def _fields(delta: Delta) -> dict[str, Any]:
    fields: dict[str, Any] | None = json.loads(delta.extras or "{}").get(ENVELOPE, {}).get("entry")
    if fields is None:
        raise InvalidInput(f"call {delta.call_id} was not put as a token entry")
    return fields


def _begins_with(prompt: Any, parent: Delta) -> bool:
    """Whether a prompt starts with the parent's whole sequence, by the digest that the parent came with."""
    length = parent.cum_len
    return len(prompt) >= length and digests.entry_digest(prompt[:length]) == _fields(parent).get("digest")


def _ids(delta: Delta) -> Any:
    return np.frombuffer(delta.token_ids or b"", np.int32)


def _history(delta: Delta, ancestors: dict[str, Delta]) -> list[Any]:
    """The tokens before a delta, by ancestor from the root on."""
    found: list[Any] = []
    step = delta
    while step.parent_call_id is not None and len(found) < len(ancestors):
        step = ancestors[step.parent_call_id]
        found.append(_ids(step))
    return found[::-1]
