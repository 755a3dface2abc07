"""The seeded conversations of W4: what agents send turn by turn, as chat messages that grow by two a turn.

A request is a system text, a question of 600 characters and, for every turn before, an answer of 900 and another
question of 600. Equal seeds give equal texts.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from string import ascii_lowercase
from typing import Any

__all__ = ["DELTA", "Conversation", "Seconds", "around", "conversations"]

Message = dict[str, Any]
DELTA = 512
"""Tokens that a call is said to add, half of them sampled; nobody here is given one."""
_QUESTION, _ANSWER = 600, 900
_SYSTEM = "You are a careful agent."


@dataclass(frozen=True, kw_only=True)
class Conversation:
    """One rollout of some turns."""

    rollout_id: str
    group_id: str
    opening: tuple[Message, ...]
    """What comes before the first answer."""
    answers: tuple[str, ...]
    """What the model says, turn by turn."""
    questions: tuple[str, ...]
    """What it is asked after each."""

    def request(self, turn: int) -> list[Message]:
        """The messages of the request of a turn, from 0 to as many as there are answers."""
        messages = list(self.opening)
        for answer, question in zip(self.answers[:turn], self.questions[:turn], strict=True):
            messages += [{"role": "assistant", "content": answer}, {"role": "user", "content": question}]
        return messages


@dataclass(frozen=True, slots=True)
class Seconds:
    """Of each call, turn by turn of all conversations."""

    record: list[float] = field(default_factory=list[float])
    resolve: list[float] = field(default_factory=list[float])
    """The request after it."""
    look_up: list[float] = field(default_factory=list[float])
    """The part of `resolve` after the hashes."""


def around(seconds: Sequence[float], turn: int, conversations: int) -> Sequence[float]:
    """Of what was timed turn by turn of all conversations: a turn, counted from 1, and its neighbours."""
    return seconds[(turn - 2) * conversations : (turn + 1) * conversations]


def conversations(count: int, *, turns: int, seed: int, group_size: int = 8) -> list[Conversation]:
    """`count` conversations; no two texts of one seed are alike."""
    rng = random.Random(seed)
    words = ["".join(rng.choices(ascii_lowercase, k=rng.randint(2, 9))) for _ in range(2000)]

    def text(length: int) -> str:
        return " ".join(rng.choices(words, k=length // 6))[:length]

    made: list[Conversation] = []
    for index in range(count):
        group_id = f"c{seed}-{index // group_size:05d}"
        opening = ({"role": "system", "content": _SYSTEM}, {"role": "user", "content": text(_QUESTION)})
        made.append(
            Conversation(
                rollout_id=f"{group_id}_g{index % group_size}",
                group_id=group_id,
                opening=opening,
                answers=tuple(text(_ANSWER) for _ in range(turns)),
                questions=tuple(text(_QUESTION) for _ in range(turns)),
            )
        )
    return made
