"""The seeded workloads that every contender of a run is given.

W1 stages calls: 16 a rollout, a delta of 512 tokens each. W3 verifies and linearizes whole rollouts: 8 calls of 256
tokens. Half of a delta is prompt (mask 0, logprob 0.0), half is sampled. The weight version moves in the middle of
every fourth rollout. Equal seeds give equal bytes on every machine.

A token counts as 9 bytes (int32 id, uint8 mask, float32 logprob), whatever a contender makes of it on disk.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

__all__ = ["BYTES_PER_TOKEN", "GROUP_SIZE", "Call", "Rollout", "rollouts"]

BYTES_PER_TOKEN = 9
GROUP_SIZE = 4
_VOCABULARY = 151_936


@dataclass(frozen=True, kw_only=True)
class Call:
    """One model call of a linear rollout; the arrays hold its delta, prompt suffix first."""

    rollout_id: str
    call_id: str
    parent_call_id: str | None
    prev_len: int
    weight_version: int
    token_ids: npt.NDArray[np.int32]
    token_mask: npt.NDArray[np.uint8]
    logprobs: npt.NDArray[np.float32]

    @property
    def carried(self) -> int:
        """Tokens of the delta that are prompt."""
        return len(self.token_ids) // 2

    @property
    def cum_len(self) -> int:
        """Tokens of the whole sequence, this call's answer included."""
        return self.prev_len + len(self.token_ids)

    @cached_property
    def sampled_ids(self) -> list[int]:
        """The sampled ids as an engine hands them over: a Python list."""
        return self.token_ids[self.carried :].tolist()

    @cached_property
    def sampled_logprobs(self) -> list[float]:
        """The log-probabilities of `sampled_ids`, as a Python list."""
        return self.logprobs[self.carried :].tolist()


@dataclass(frozen=True, kw_only=True)
class Rollout:
    """A linear chain of calls."""

    rollout_id: str
    group_id: str
    calls: tuple[Call, ...]

    @cached_property
    def token_ids(self) -> list[int]:
        """The whole sequence; the prompt of call k is its first `prev_len + carried` ids."""
        return np.concatenate([call.token_ids for call in self.calls]).tolist()

    def prompt(self, call: Call) -> array[int]:
        """The whole prompt that the engine was given for `call`, as the gate splices it."""
        return array("i", self.token_ids[: call.prev_len + call.carried])

    def prefix(self, call: Call) -> bytes:
        """The whole sequence of the parent of `call`, as the gate's cache holds it."""
        return array("i", self.token_ids[: call.prev_len]).tobytes()


def rollouts(
    count: int, *, calls: int, delta: int, seed: int, group_size: int = GROUP_SIZE, first: int = 0
) -> list[Rollout]:
    """`count` rollouts of `calls` calls of `delta` tokens each, numbered from `first`."""
    rng = np.random.default_rng(seed)
    made: list[Rollout] = []
    for index in range(first, first + count):
        group_id = f"w{seed}-{index // group_size:05d}"
        rollout_id = f"{group_id}_g{index % group_size}"
        chain: list[Call] = []
        for position in range(calls):
            mask = np.repeat(np.array([0, 1], np.uint8), [delta // 2, delta - delta // 2])
            moved = index % 4 == 0 and position >= calls // 2
            chain.append(
                Call(
                    rollout_id=rollout_id,
                    call_id=f"c{position:03d}",
                    parent_call_id=chain[-1].call_id if chain else None,
                    prev_len=position * delta,
                    weight_version=index // 64 + moved,
                    token_ids=rng.integers(0, _VOCABULARY, delta, dtype=np.int32),
                    token_mask=mask,
                    logprobs=np.where(mask, rng.random(delta, dtype=np.float32) * -3 - 0.001, 0).astype(np.float32),
                )
            )
        made.append(Rollout(rollout_id=rollout_id, group_id=group_id, calls=tuple(chain)))
    return made
