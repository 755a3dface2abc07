"""TransferQueue on the same calls: `SimpleStorage`, its default, on a local Ray; runs in an environment of its own.

The works that it answers for, with what each is told about how much there is to do:

- `stage` (threads, rollouts, calls, tokens): `kv_put` a call, acknowledged from the memory of a storage actor: one
  after the other, then with so many rollouts in flight.
- `read` (rollouts, calls, tokens): `kv_batch_get` of the calls of a rollout, and of all, to its tensors.
- `linearize` (rollouts, calls, tokens): `kv_batch_get` of all calls, then `concatenate` for each rollout. Nothing is
  verified.

Ray and its actors are started and stopped outside the clock.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Generator, Iterable, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

os.environ |= {"RAY_USAGE_STATS_ENABLED": "0", "TQ_LOGGING_LEVEL": "ERROR"}  # read when they are imported

import numpy as np
import ray
import torch
import transfer_queue
from omegaconf import OmegaConf
from tensordict import TensorDict

from bench.answer import Found, answer
from bench.measure import one_by_one, rate, together, typical
from bench.workload import Call, Rollout, rollouts

__all__: list[str] = []

_ARRAYS = ("token_ids", "token_mask", "logprobs")
_PARTITION = "bench"
_AT_ONCE = 64
"""Calls of a put that is not timed."""


@contextmanager
def _queue() -> Generator[None]:
    # Not the folder that is measured: nothing is written to it, and the path of a socket must be short.
    with tempfile.TemporaryDirectory(prefix="bench-ray-", dir="/tmp") as folder:
        ray.init(
            num_cpus=2,  # one for its controller, one for its storage
            include_dashboard=False,
            log_to_driver=False,
            logging_level="ERROR",
            object_store_memory=128 * 2**20,
            _temp_dir=folder,
        )
        try:
            transfer_queue.init(OmegaConf.create({"backend": {"SimpleStorage": {"num_data_storage_units": 1}}}))
            yield
            transfer_queue.close()
        finally:
            ray.shutdown()


def _calls(work: Iterable[Rollout]) -> list[Call]:
    return [call for rollout in work for call in rollout.calls]


def _key(call: Call) -> str:
    return f"{call.rollout_id}/{call.call_id}"


def _tag(call: Call) -> dict[str, Any]:
    names = ("rollout_id", "call_id", "parent_call_id", "prev_len", "weight_version")
    return {name: getattr(call, name) for name in names}


def _fields(call: Call) -> dict[str, torch.Tensor]:
    return {name: torch.from_numpy(getattr(call, name)) for name in _ARRAYS}


def _put_all(calls: Sequence[Call]) -> None:
    for at in range(0, len(calls), _AT_ONCE):
        some = calls[at : at + _AT_ONCE]
        fields = {
            name: torch.nested.as_nested_tensor([_fields(call)[name] for call in some], layout=torch.jagged)
            for name in _ARRAYS
        }
        transfer_queue.kv_batch_put(
            keys=[_key(call) for call in some],
            partition_id=_PARTITION,
            fields=TensorDict(fields, batch_size=[len(some)]),
            tags=[_tag(call) for call in some],
        )


def _get(calls: Sequence[Call]) -> Any:
    return transfer_queue.kv_batch_get([_key(call) for call in calls], _PARTITION)


def _arrays(found: Any) -> list[tuple[np.ndarray, ...]]:
    """The arrays of each call, as views."""
    return list(zip(*([tensor.numpy() for tensor in found[name].unbind()] for name in _ARRAYS), strict=True))


def _check(calls: Sequence[Call]) -> None:
    """These calls come back as they are, or nothing is told."""
    for call, arrays in zip(calls, _arrays(_get(calls)), strict=True):
        wanted = (getattr(call, name) for name in _ARRAYS)
        if not all(np.array_equal(one, other) for one, other in zip(arrays, wanted, strict=True)):
            raise AssertionError(f"{_key(call)}: the peer has other tokens")


def stage(seed: int, spec: Sequence[int], folder: Path) -> Found:  # noqa: ARG001 - nothing is written
    """Calls a second, each in memory."""
    threads, count, calls, delta = spec
    chains = [rollout.calls for rollout in rollouts(count, calls=calls, delta=delta, seed=seed)]
    made = [call for chain in chains for call in chain]
    fields, tags = ({_key(call): each(call) for call in made} for each in (_fields, _tag))

    def put(call: Call) -> None:
        key = _key(call)
        transfer_queue.kv_put(key=key, partition_id=_PARTITION, fields=fields[key], tag=tags[key])

    with _queue():
        one = one_by_one(put, made)
        _check(made)
        transfer_queue.kv_clear(list(fields), _PARTITION)
        many = together(put, chains, threads=threads)
        _check(made)
    return {"stage": rate(one, len(made)), "together": rate(many, len(made))}


def read(seed: int, spec: Sequence[int], folder: Path) -> Found:  # noqa: ARG001 - nothing is written
    """Milliseconds of a rollout's calls; all calls, a second."""
    count, calls, delta = spec
    work = rollouts(count, calls=calls, delta=delta, seed=seed)
    made = _calls(work)
    order = np.random.default_rng(1).permutation(count)[:100]
    with _queue():
        _put_all(made)
        _check(made)
        latencies = one_by_one(_get, [work[int(at)].calls for at in order])[2]
        start = time.monotonic()
        _get(made)
        end = time.monotonic()
    return {"one": typical(latencies), "all": rate((start, end, []), len(made))}


def linearize(seed: int, spec: Sequence[int], folder: Path) -> Found:  # noqa: ARG001 - nothing is written
    """Millions of tokens a second."""
    count, calls, delta = spec
    work = rollouts(count, calls=calls, delta=delta, seed=seed)
    made = _calls(work)
    with _queue():
        _put_all(made)
        _check(made)
        start = time.monotonic()
        found = _arrays(_get(made))
        chains = [found[at : at + calls] for at in range(0, len(found), calls)]
        rows = [[np.concatenate(column) for column in zip(*chain, strict=True)] for chain in chains]
        end = time.monotonic()
    if [row[0].tolist() for row in rows] != [rollout.token_ids for rollout in work]:
        raise AssertionError("the peer's rows are not the rollouts' tokens")
    return {"linearize": rate((start, end, []), count * calls * delta / 1e6)}


if __name__ == "__main__":
    answer(stage, read, linearize)
