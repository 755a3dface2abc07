"""What the demo plants, stated before it runs; the lake must say the same afterwards."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

__all__ = ["Expected", "Kind", "expected", "kind_of"]

Kind = Literal["plain", "fork", "compaction", "environment_dies", "retried"]

_SPECIAL: dict[tuple[int, int], Kind] = {
    (0, 1): "fork",
    (1, 2): "compaction",
    (2, 3): "environment_dies",
    (3, 0): "retried",
}


def kind_of(group: int, rollout: int, groups: int, rollouts: int) -> Kind:
    """How rollout `rollout` of group `group` behaves; small demos fold the special ones into what there is."""
    for (special_group, special_rollout), kind in _SPECIAL.items():
        if (special_group % groups, special_rollout % rollouts) == (group, rollout):
            return kind
    return "plain"


@dataclass(frozen=True, slots=True)
class Expected:
    """What must come out, whatever the model says."""

    valid_rows: int
    placeholders: dict[str, int]
    """By reason."""
    roots: dict[str, int]
    """By cause."""


def expected(groups: int, rollouts: int) -> Expected:
    """The counts that follow from the plan."""
    kinds = [kind_of(g, r, groups, rollouts) for g in range(groups) for r in range(rollouts)]
    died = kinds.count("environment_dies")
    compacted = kinds.count("compaction")
    placeholders = {"environment_failed": died} if died else {}
    roots = {"no_history": len(kinds) + kinds.count("retried")}
    if compacted:
        roots["no_match"] = compacted
    return Expected(valid_rows=len(kinds) - died, placeholders=placeholders, roots=roots)
