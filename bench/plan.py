"""How much a run does, and what every work of it is given."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

__all__ = ["FULL", "QUICK", "Plan", "Size"]

T = TypeVar("T")
Shape = tuple[int, int, int]
"""Rollouts, calls of each, tokens of a call's delta."""


@dataclass(frozen=True, kw_only=True)
class Size:
    """How much a run does."""

    rounds: int
    stage: Shape
    linear: Shape
    linear_large: Shape
    conversations: tuple[int, int, int]
    """Rollouts, turns of each, and the turns of one long one."""
    groups: int
    """Groups of 8 x 16 x 512 that are published in a round."""
    groups_before: int
    """Groups of that shape that the lake holds before."""
    gate: tuple[int, int, int]
    """Rollouts with one call in flight, rollouts with 64, turns of each."""
    open_calls: int
    load: Shape
    peer_share: int
    """A peer that is slow does one in so many of the rollouts: its figures are by the call, the row or the token."""


FULL = Size(
    rounds=5,
    stage=(125, 16, 512),
    linear=(500, 8, 256),
    linear_large=(2000, 16, 512),
    conversations=(200, 16, 200),
    groups=24,
    groups_before=30,
    gate=(8, 64, 16),
    open_calls=50_000,
    load=(512, 8, 256),
    peer_share=5,
)
QUICK = Size(
    rounds=2,
    stage=(25, 16, 512),
    linear=(60, 8, 256),
    linear_large=(100, 16, 512),
    conversations=(20, 16, 50),
    groups=3,
    groups_before=3,
    gate=(1, 64, 2),
    open_calls=2_000,
    load=(64, 8, 256),
    peer_share=5,
)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What one work is given."""

    size: Size
    seed: int
    scratch: Path
    """A folder of its own, on the disk that is measured; removed after it."""
    held: ExitStack
    """Closed after it."""
    peers: Mapping[str, Path] = field(default_factory=dict[str, Path])
    """Interpreters of the environments of the peers that are there, by their names; the others are left out."""

    def fresh(self, run: Callable[[Path], T]) -> Callable[[], T]:
        """`run` in a new folder each time."""

        def in_folder() -> T:
            folder = Path(tempfile.mkdtemp(dir=self.scratch))
            try:
                return run(folder)
            finally:
                shutil.rmtree(folder)

        return in_folder
