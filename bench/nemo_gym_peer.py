"""NeMo-Gym's own capture and verifier on the same workload; runs in its own environment and prints one JSON line.

`stage`: `RolloutTokenCapture` (digest and validation) into a sink that appends one JSON line and syncs it, the least
that its `StagingSink` protocol allows. `linearize`: `verify_and_linearize` over snapshots that are built and validated
before the clock starts. It reads `python -m bench.nemo_gym_peer ROLLOUTS CALLS DELTA SEED FOLDER`.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from nemo_gym.token_id_capture import CallRecord
from nemo_gym.token_id_capture.staging import (
    CaptureAdmission,
    RolloutReceipt,
    RolloutTokenCapture,
    StagedCallBaseSnapshot,
    StageResult,
    verify_and_linearize,
)

from bench.workload import Call, Rollout, rollouts


class _JsonLines:
    """A `StagingSink`: one synced line a call; keeps the records for the verifier."""

    def __init__(self, path: Path) -> None:
        self._handle = os.open(path, os.O_CREAT | os.O_WRONLY | os.O_APPEND)
        self.records: list[Any] = []

    def stage(self, record: Any, *, attachments: Any = None) -> StageResult:
        del attachments
        os.write(self._handle, record.model_dump_json().encode() + b"\n")
        os.fdatasync(self._handle)
        self.records.append(record)
        return StageResult(ok=True, staging_key=record.staging_key)

    def close(self) -> None:
        os.close(self._handle)


def _admission(call: Call, before: Any, prefix: Sequence[int]) -> CaptureAdmission:
    if before is None:
        return CaptureAdmission(rollout_id=call.rollout_id, model_call_id=call.call_id, mode="text")
    return CaptureAdmission(
        rollout_id=call.rollout_id,
        model_call_id=call.call_id,
        parent_call_id=call.parent_call_id,
        prev_len=call.prev_len,
        mode="token_in",
        required_prefix_token_ids=list(prefix),
        parent_chain_hash=before.chain_hash,
    )


def _stage(work: Sequence[Rollout], path: Path) -> tuple[float, list[list[Any]], list[Any]]:
    """(seconds, coordinates by rollout, records)."""
    sink = _JsonLines(path)
    capture = RolloutTokenCapture(sink=sink, weight_version_fn=lambda: 1)
    inputs = [[(call, rollout.prompt(call).tolist()) for call in rollout.calls] for rollout in work]
    for rollout in work:
        for call in rollout.calls:
            _ = call.sampled_ids, call.sampled_logprobs
    staged: list[list[Any]] = []
    start = time.perf_counter()
    for chain in inputs:
        done: list[Any] = []
        for call, prompt in chain:
            ticket = capture.begin_call(
                _admission(call, done[-1] if done else None, prompt[: call.prev_len]),
                weight_version=call.weight_version,
            )
            coords = capture.complete_call(
                ticket,
                prompt_token_ids=prompt,
                generated_token_ids=call.sampled_ids,
                generated_logprobs=call.sampled_logprobs,
            )
            if coords.disposition != "staged":
                raise AssertionError(f"{call.rollout_id} {call.call_id} was not staged: {coords}")
            done.append(coords)
        staged.append(done)
    seconds = time.perf_counter() - start
    sink.close()
    return seconds, staged, sink.records


def _receipt(rollout: Rollout, chain: Sequence[Any]) -> RolloutReceipt:
    manifest = [
        CallRecord(
            model_call_id=coords.model_call_id,
            parent_call_id=coords.parent_call_id,
            prev_len=coords.prev_len,
            delta_len=coords.delta_len,
            cum_len=coords.cum_len,
            weight_version=coords.weight_version,
            digest=coords.digest,
            extras_digest=coords.extras_digest,
            staging_key=coords.staging_key,
            mode="text" if coords.parent_call_id is None else "token_in",
            chain_hash=coords.chain_hash,
            cumulative_hash=coords.cumulative_hash,
            response_id=f"response-{coords.model_call_id}",
        )
        for coords in chain
    ]
    return RolloutReceipt(
        rollout_id=rollout.rollout_id,
        terminal_model_call_id=manifest[-1].model_call_id,
        manifest=manifest,
        terminal_selection="declared",
    )


def _linearize(work: Sequence[Rollout], staged: Sequence[Sequence[Any]], records: Sequence[Any]) -> float:
    fields = list(StagedCallBaseSnapshot.model_fields)
    snapshots = [StagedCallBaseSnapshot(**{name: getattr(record, name) for name in fields}) for record in records]
    jobs: list[tuple[RolloutReceipt, list[Any]]] = []
    position = 0
    for rollout, chain in zip(work, staged, strict=True):
        jobs.append((_receipt(rollout, chain), snapshots[position : position + len(chain)]))
        position += len(chain)
    start = time.perf_counter()
    rows = [verify_and_linearize(receipt, chain) for receipt, chain in jobs]
    seconds = time.perf_counter() - start
    if list(rows[-1].token_ids) != work[-1].token_ids:
        raise AssertionError("the peer's row is not the rollout's tokens")
    return seconds


def main(arguments: Sequence[str]) -> None:
    """Stage, then linearize; print the seconds of both."""
    count, calls, delta, seed = map(int, arguments[:4])
    work = rollouts(count, calls=calls, delta=delta, seed=seed)
    staging, staged, records = _stage(work, Path(arguments[4]) / "nemo-gym.jsonl")
    linearizing = _linearize(work, staged, records)
    print(json.dumps({"version": version("nemo-gym"), "stage_s": staging, "linearize_s": linearizing}))


if __name__ == "__main__":
    main(sys.argv[1:])
