"""The short form of `bench/soak.py`: nothing lost, nothing twice, every prefix exact, and no token held."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.restart import fill
from bench.soak import held, soak
from tokenlake.store.lake import OwnedLake


@pytest.mark.slow
def test_a_soak_loses_nothing_and_repeats_nothing(tmp_path: Path) -> None:
    found = soak(tmp_path, rollouts=40, turns=6, in_flight=32)
    assert (found.calls, found.lost, found.duplicated, found.wrong_prefixes) == (240, 0, 0, 0)
    assert len(found.overheads) == 240


def test_what_the_gate_holds_of_a_call_does_not_grow_with_its_tokens(tmp_path: Path) -> None:
    sizes: list[float] = []
    # Both are beyond the numbers that Python holds anyway.
    for tokens in (300, 4096):
        with OwnedLake.open(tmp_path / str(tokens)) as lake:
            fill(lake, 64, closed=False, tag="o", tokens=tokens)
            sizes.append(held(lake))
    assert sizes[0] < 4000
    assert sizes[1] == pytest.approx(sizes[0], rel=0.05)
