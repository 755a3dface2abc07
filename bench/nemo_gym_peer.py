"""NeMo-Gym's own capture, ledger and verifier on the same workloads; runs in an environment of its own.

The works that it answers for, with what each is told about how much there is to do:

- `stage` (rollouts, calls, tokens): `RolloutTokenCapture` into a sink that appends one JSON line and syncs it, the
  least that its `StagingSink` protocol allows; then the same with a row in `FileLineageStore`, which its gate adds.
- `linearize` (rollouts, calls, tokens) and `groups` (groups, rollouts, calls, tokens): `verify_and_linearize` over
  snapshots that are built and validated before the clock starts, all at once and group by group.
- `ledger` (rollouts, turns): `FileLineageStore`, token-free rows: `record` a call, then `resolve` the request after it.
- `growth` (rollouts, turns, turn...): the same store; microseconds of calls around these turns.
- `held` (rollouts, turns): the bytes that this store holds for each call, by tracemalloc.
"""

from __future__ import annotations

import asyncio
import gc
import itertools
import os
import time
import tracemalloc
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from nemo_gym.token_id_capture import CallRecord, CaptureLedgerCommit, FileLineageStore
from nemo_gym.token_id_capture.staging import (
    CaptureAdmission,
    RolloutReceipt,
    RolloutTokenCapture,
    StagedCallBaseSnapshot,
    StageResult,
    verify_and_linearize,
)

from bench.answer import Found, answer
from bench.conversations import DELTA, Conversation, around, conversations
from bench.measure import Sample, one_by_one, rate, typical
from bench.workload import Call, Rollout, rollouts

__all__ = ["JsonLines", "ledger_record", "output_item"]

_DIGEST = "a" * 64


class JsonLines:
    """A `StagingSink`: one synced line a call."""

    def __init__(self, path: Path) -> None:
        self._handle = os.open(path, os.O_CREAT | os.O_WRONLY | os.O_APPEND)

    def stage(self, record: Any, *, attachments: Any = None) -> StageResult:
        """Durably."""
        del attachments
        os.write(self._handle, record.model_dump_json().encode() + b"\n")
        os.fdatasync(self._handle)
        return StageResult(ok=True, staging_key=record.staging_key)

    def close(self) -> None:
        """Let go of the file."""
        os.close(self._handle)


class _Kept:
    """A `StagingSink` that keeps the records for the verifier."""

    def __init__(self) -> None:
        self.records: list[Any] = []

    def stage(self, record: Any, *, attachments: Any = None) -> StageResult:
        del attachments
        self.records.append(record)
        return StageResult(ok=True, staging_key=record.staging_key)


class _Capturing:
    """Captures rollouts call by call; knows what each continues."""

    def __init__(self, sink: Any, work: Sequence[Rollout]) -> None:
        self._capture = RolloutTokenCapture(sink=sink, weight_version_fn=lambda: 1)
        self.inputs = [(call, rollout.prompt(call).tolist()) for rollout in work for call in rollout.calls]
        for call, _ in self.inputs:
            _ = call.sampled_ids, call.sampled_logprobs  # made before the clock: an engine has them already
        self.staged: dict[str, list[Any]] = {rollout.rollout_id: [] for rollout in work}

    def put(self, item: tuple[Call, list[int]]) -> Any:
        call, prompt = item
        chain = self.staged[call.rollout_id]
        ticket = self._capture.begin_call(
            _admission(call, chain[-1] if chain else None, prompt[: call.prev_len]), weight_version=call.weight_version
        )
        coords = self._capture.complete_call(
            ticket,
            prompt_token_ids=prompt,
            generated_token_ids=call.sampled_ids,
            generated_logprobs=call.sampled_logprobs,
        )
        if coords.disposition != "staged":
            raise AssertionError(f"{call.rollout_id} {call.call_id} was not staged: {coords}")
        chain.append(coords)
        return coords


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


def ledger_record(coords: Any) -> CallRecord:
    """A ledger's record of a call that was staged."""
    names = (
        *("model_call_id", "parent_call_id", "prev_len", "delta_len", "cum_len", "weight_version", "digest"),
        *("extras_digest", "staging_key", "chain_hash", "cumulative_hash"),
    )
    return CallRecord(
        **{name: getattr(coords, name) for name in names},
        mode="text" if coords.parent_call_id is None else "token_in",
        response_id=f"response-{coords.model_call_id}",
        fingerprint_version=2,
    )


def stage(seed: int, spec: Sequence[int], folder: Path) -> Found:
    """Calls a second, each durable."""
    count, calls, delta = spec
    work = rollouts(count, calls=calls, delta=delta, seed=seed)
    sink = JsonLines(folder / "stage.jsonl")
    capturing = _Capturing(sink, work)
    staged = one_by_one(capturing.put, capturing.inputs)
    capturing, ledger = _Capturing(sink, work), FileLineageStore(folder / "ledger")
    said = {
        rollout.rollout_id: each
        for rollout, each in zip(work, conversations(count, turns=calls, seed=seed), strict=True)
    }

    def commit(item: tuple[Call, list[int]]) -> None:
        capturing.put(item)
        chain = capturing.staged[item[0].rollout_id]
        ledger._record(_commit(said[item[0].rollout_id], len(chain) - 1, chain, item[0].rollout_id))  # noqa: SLF001

    committed = one_by_one(commit, capturing.inputs)
    sink.close()
    return {"stage": rate(staged, count * calls), "commit": rate(committed, count * calls)}


def _verifying(seed: int, count: int, calls: int, delta: int) -> list[Callable[[], Any]]:
    """For each rollout what verifies and linearizes it; the first is compared with what it should be."""
    work = rollouts(count, calls=calls, delta=delta, seed=seed)
    fields = list(StagedCallBaseSnapshot.model_fields)
    jobs: list[Callable[[], Any]] = []
    for rollout in work:
        sink = _Kept()
        capturing = _Capturing(sink, [rollout])
        manifest = [ledger_record(capturing.put(item)) for item in capturing.inputs]
        receipt = RolloutReceipt(
            rollout_id=rollout.rollout_id,
            terminal_model_call_id=manifest[-1].model_call_id,
            manifest=manifest,
            terminal_selection="declared",
        )
        snapshots = [
            StagedCallBaseSnapshot(**{name: getattr(record, name) for name in fields}) for record in sink.records
        ]
        jobs.append(lambda receipt=receipt, snapshots=snapshots: verify_and_linearize(receipt, snapshots))
    if list(jobs[0]().token_ids) != work[0].token_ids:
        raise AssertionError("the peer's row is not the rollout's tokens")
    return jobs


def linearize(seed: int, spec: Sequence[int], folder: Path) -> Found:  # noqa: ARG001 - nothing is written
    """Millions of tokens a second."""
    count, calls, delta = spec
    timing = one_by_one(lambda job: job(), _verifying(seed, count, calls, delta))
    return {"linearize": rate(timing, count * calls * delta / 1e6)}


def groups(seed: int, spec: Sequence[int], folder: Path) -> Found:  # noqa: ARG001 - nothing is written
    """Milliseconds of a group."""
    count, size, calls, delta = spec
    jobs = iter(_verifying(seed, count * size, calls, delta))
    batches = [list(itertools.islice(jobs, size)) for _ in range(count)]
    return {"group": typical(one_by_one(lambda batch: [job() for job in batch], batches)[2])}


def _commit(said: Conversation, turn: int, chain: Sequence[Any] | None, rollout_id: str) -> CaptureLedgerCommit:
    """A ledger row; without a `chain` that was staged, of a call that says it was."""
    if chain is None:
        record = CallRecord(
            model_call_id=_call_id(turn),
            parent_call_id=_call_id(turn - 1) if turn else None,
            prev_len=turn * DELTA,
            delta_len=DELTA,
            cum_len=(turn + 1) * DELTA,
            weight_version=1,
            digest=_DIGEST,
            extras_digest=_DIGEST,
            staging_key=f"{rollout_id}/{_call_id(turn)}",
            mode="token_in" if turn else "text",
            chain_hash=_DIGEST,
            cumulative_hash=_DIGEST,
            response_id=f"response-{_call_id(turn)}",
            fingerprint_version=2,
        )
        keys = tuple(f"{rollout_id}/{_call_id(each)}" for each in range(turn + 1))
    else:
        record, keys = ledger_record(chain[-1]), tuple(each.staging_key for each in chain)
    return CaptureLedgerCommit(
        rollout_id=rollout_id,
        record=record,
        staging_chain=keys,
        request_items=_items(said, turn),
        response_items=[output_item(said.answers[turn])],
    )


def _items(said: Conversation, turn: int) -> list[dict[str, Any]]:
    """A request as this ledger takes it: an answer is the output item that was served."""
    return [
        output_item(message["content"]) if message["role"] == "assistant" else message for message in said.request(turn)
    ]


def output_item(text: str) -> dict[str, Any]:
    """What was served, as this ledger takes it."""
    return {"role": "assistant", "type": "message", "content": [{"type": "output_text", "text": text}]}


def _call_id(turn: int) -> str:
    return f"c{turn:03d}"


async def _ledger(store: FileLineageStore, work: Sequence[Conversation], turns: int) -> tuple[list[float], list[float]]:
    recorded: list[float] = []
    resolved: list[float] = []
    for turn in range(turns):
        for said in work:
            commit, following = _commit(said, turn, None, said.rollout_id), _items(said, turn + 1)
            began = time.perf_counter()
            await store.record(commit)
            between = time.perf_counter()
            found = await store.resolve(said.rollout_id, following)
            resolved.append(time.perf_counter() - between)
            recorded.append(between - began)
            if found.match is None or found.match.model_call_id != _call_id(turn):
                raise AssertionError(f"{said.rollout_id}: the request after turn {turn} is resolved to {found}")
    await store.close()
    return recorded, resolved


def ledger(seed: int, spec: Sequence[int], folder: Path) -> Found:
    """Calls a second, recorded and resolved."""
    count, turns = spec
    work = conversations(count, turns=turns, seed=seed)
    recorded, resolved = asyncio.run(_ledger(FileLineageStore(folder), work, turns))
    return {
        measure: Sample(value=len(seconds) / sum(seconds), latencies=seconds)
        for measure, seconds in (("record", recorded), ("resolve", resolved))
    }


def growth(seed: int, spec: Sequence[int], folder: Path) -> Found:
    """Microseconds of a turn, recorded and resolved."""
    count, length, *turns = spec
    work = conversations(count, turns=length, seed=seed)
    recorded, resolved = asyncio.run(_ledger(FileLineageStore(folder), work, length))
    return {
        f"{measure} {turn}": Sample(value=typical(near := around(found, turn, count)).value * 1e3, latencies=near)
        for measure, found in (("record", recorded), ("resolve", resolved))
        for turn in turns
    }


def held(seed: int, spec: Sequence[int], folder: Path) -> Found:
    """Bytes for each call that is recorded; as many are recorded before, for what is not by the call."""
    count, turns = spec
    work, store = conversations(2 * count, turns=turns, seed=seed), FileLineageStore(folder)
    sizes: list[int] = []
    tracemalloc.start()
    for part in (work[:count], work[count:]):
        for turn in range(turns):
            for said in part:
                store._record(_commit(said, turn, None, said.rollout_id))  # noqa: SLF001
                store._resolve(said.rollout_id, _items(said, turn + 1))  # noqa: SLF001
        gc.collect()
        sizes.append(tracemalloc.get_traced_memory()[0])
    return {"held": Sample(value=(sizes[1] - sizes[0]) / (count * turns))}


if __name__ == "__main__":
    answer(stage, linearize, groups, ledger, growth, held)
