"""NeMo-Gym's `StagingSink` and `StagingSource` over a lake: put where a transfer queue was.

A worker stages each call as an ordinary delta, durable when `stage` returns; NeMo-Gym's digests of it travel in the
delta's extras. The source gives back exactly what was staged, after it recomputed NeMo-Gym's digest from the bytes.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import Any

import numpy as np
from nemo_gym.token_id_capture.staging import StagedCallBaseSnapshot, StagedCallRecord, StageResult

from tokenlake.errors import InvalidInput, NotFound, TokenlakeError
from tokenlake.ids import check_call_id
from tokenlake.ingest.capture import ParentLink
from tokenlake.ingest.coords import Coords
from tokenlake.ingest.nemo_gym import digests
from tokenlake.ingest.nemo_gym._extra import EXTRA
from tokenlake.ingest.nemo_gym.carrier import lake_place
from tokenlake.ingest.nemo_gym.writer import ENVELOPE, GymWriter, link_to
from tokenlake.store.delta import Delta
from tokenlake.store.staged import open_staged

__all__ = ["EXTRA", "LakeStagingSink", "LakeStagingSource", "snapshot_of"]


class LakeStagingSink:
    """A `StagingSink`: thread-safe, one for each process; processes share a lake.

    `writer` names the folder it appends to, which only one process may have; without it the name is made up.
    Attachments are refused: a lake keeps tokens.
    """

    def __init__(self, lake: str | os.PathLike[str], writer: str | None = None) -> None:
        self._writer = GymWriter(lake, writer)

    def stage(self, record: StagedCallRecord, *, attachments: Mapping[str, Any] | None = None) -> StageResult:
        """Make one call durable. What is refused is a result that is not ok, with the reason; nothing is raised."""
        if attachments:
            return StageResult(ok=False, error="a lake stores no attachments: stage media elsewhere")
        try:
            coords = self._stage(record)
        except (TokenlakeError, OSError) as error:
            return StageResult(ok=False, error=str(error))
        if coords.disposition == "capture_failed":
            return StageResult(ok=False, error=f"the call was not staged: {coords.reason}")
        return StageResult(ok=True, staging_key=record.staging_key)

    def close(self) -> None:
        """Seal what was staged. Idempotent."""
        self._writer.close()

    def _stage(self, record: StagedCallRecord) -> Coords:
        rollout_id, attempt = lake_place(record.rollout_id)
        ids = np.asarray(record.token_ids_delta, dtype=np.int32)
        mask = np.asarray(record.token_mask_delta, dtype=np.float32)
        if _digest(record, ids, mask, record.generation_log_probs_delta) != record.digest:
            raise InvalidInput("the digest is not that of the call")
        if digests.extras_digest(record.extras) != record.extras_digest or ENVELOPE in (record.extras or {}):
            raise InvalidInput(
                f"the extras are not those of the call, or have the key {ENVELOPE!r}, which is the lake's"
            )
        carried = int(np.count_nonzero(mask == 0))
        if mask[:carried].any():
            raise InvalidInput("a sampled token stands before a carried one")
        core = self._writer.core
        ticket = core.begin(
            rollout_id=rollout_id,
            attempt=attempt,
            call_id=check_call_id(record.model_call_id),
            parent=self._parent(record, rollout_id, attempt, ids),
        )
        # Only its own tokens are known here: the history is bound by the parent's chain hash.
        prompt = np.concatenate([np.zeros(record.prev_len, np.int32), ids[:carried]])
        return core.complete(
            ticket,
            prompt_token_ids=prompt.data,
            token_ids=ids[carried:].data,
            logprobs=record.generation_log_probs_delta[carried:],
            finish_reason=None,
            weight_version=record.weight_version,
            weight_version_end=record.weight_version,
            extras={**(record.extras or {}), ENVELOPE: _envelope(record)},
        )

    def _parent(self, record: StagedCallRecord, rollout_id: str, attempt: int, ids: digests.Ids) -> ParentLink | None:
        parent = None
        if record.parent_call_id is not None:
            parent = self._writer.staged.find(rollout_id, attempt, record.parent_call_id)
            if parent is None or parent.cum_len != record.prev_len:
                raise InvalidInput("the parent is not staged in this lake, or has another length")
        before = None if parent is None else envelope_of(parent)["chain_hash"]
        if digests.chain_hash(before, ids) != record.chain_hash:
            raise InvalidInput("the chain hash is not that of the parent's tokens and the call's")
        return None if parent is None else link_to(parent)


class LakeStagingSource:
    """A `StagingSource`: reads what any process staged, in any process."""

    def __init__(self, lake: str | os.PathLike[str]) -> None:
        self._staged = open_staged(lake)

    def fetch(self, staging_keys: list[str]) -> list[StagedCallBaseSnapshot]:
        """One snapshot for each key, in order.

        Raises `NotFound` for a key that nothing was staged under, `InvalidInput` where the bytes are not what was
        staged.
        """
        return [self._snapshot(key) for key in staging_keys]

    def close(self) -> None:
        """Let go of the lake. Idempotent."""
        self._staged.close()

    def _snapshot(self, key: str) -> StagedCallBaseSnapshot:
        name, _, call_id = key.rpartition("/")
        rollout_id, attempt = lake_place(name)
        found = self._staged.find(rollout_id, attempt, call_id)
        if found is None:
            raise NotFound(f"nothing is staged under {key}", staging_key=key)
        return snapshot_of(name, found)


def envelope_of(delta: Delta) -> dict[str, Any]:
    """What NeMo-Gym says of a staged call. Raises `InvalidInput` for a delta that did not come from it."""
    envelope: dict[str, Any] = json.loads(delta.extras or "{}").get(ENVELOPE) or {}
    if "chain_hash" not in envelope:
        raise InvalidInput(f"call {delta.call_id} was not staged by NeMo-Gym")
    return envelope


def snapshot_of(name: str, delta: Delta) -> StagedCallBaseSnapshot:
    """What was staged of a rollout that NeMo-Gym calls `name`; raises `InvalidInput` where its digest disagrees."""
    envelope = envelope_of(delta)
    ids = np.frombuffer(delta.token_ids or b"", np.int32)
    mask = np.frombuffer(delta.token_mask or b"", np.uint8).astype(np.float32)
    logprobs = np.frombuffer(delta.logprobs or b"", np.float32)
    # The model's own validation looks at every token in Python; the digest below covers what it would look at.
    snapshot = StagedCallBaseSnapshot.model_construct(
        schema_version=envelope["schema_version"],
        rollout_id=name,
        model_call_id=delta.call_id,
        parent_call_id=delta.parent_call_id,
        mode=delta.mode,
        prev_len=delta.prev_len,
        delta_len=delta.cum_len - delta.prev_len,
        cum_len=delta.cum_len,
        weight_version=delta.weight_version,
        digest=envelope["digest"],
        token_ids_delta=ids.tolist(),
        token_mask_delta=mask.tolist(),
        generation_log_probs_delta=logprobs.tolist(),
        extras_digest=envelope["extras_digest"],
        chain_hash=envelope["chain_hash"],
        cumulative_hash=envelope["cumulative_hash"],
    )
    if _digest(snapshot, ids, mask, logprobs) != snapshot.digest:
        raise InvalidInput(f"call {delta.call_id} of {name} is not what was staged: run `tokenlake audit`")
    return snapshot


def _envelope(record: StagedCallRecord) -> dict[str, Any]:
    names = ("schema_version", "digest", "extras_digest", "chain_hash", "cumulative_hash")
    return {name: getattr(record, name) for name in names}


def _digest(call: StagedCallBaseSnapshot, ids: digests.Ids, mask: digests.Floats, logprobs: digests.Floats) -> str:
    if not call.cum_len - call.prev_len == call.delta_len == len(ids) == len(mask) == len(logprobs):
        raise InvalidInput("the lengths of the call do not hold together")
    return digests.staging_digest(
        schema_version=call.schema_version,
        rollout_id=call.rollout_id,
        model_call_id=call.model_call_id,
        parent_call_id=call.parent_call_id,
        mode=call.mode,
        prev_len=call.prev_len,
        cum_len=call.cum_len,
        weight_version=call.weight_version,
        token_ids=ids,
        token_mask=mask,
        logprobs=logprobs,
        extras_digest=call.extras_digest,
        chain_hash=call.chain_hash,
        cumulative_hash=call.cumulative_hash,
    )
