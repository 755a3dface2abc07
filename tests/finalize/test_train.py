"""The training loop over the embedded engine, as `make train` runs it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tokenlake import open as open_lake
from tokenlake.api.demo.train import train


@pytest.mark.slow
def test_the_reward_rises_and_the_ratio_is_one_before_each_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    steps = train(tmp_path / "lake", steps=4, groups=2, rollouts=8, seed=0)
    assert max(step.ratio_off for step in steps) < 1e-3
    assert steps[-1].reward > steps[0].reward
    with open_lake(tmp_path / "lake") as lake:
        assert lake.sql("SELECT consumer, consumed, waiting, checkpoint FROM consumers").fetchall() == [
            ("trainer", 8, 0, "step-3")
        ]
        trained = lake.sql("SELECT sum(trained_tokens)::BIGINT FROM advantages").fetchall()
        assert trained == [(sum(step.tokens for step in steps),)]
        versions = lake.sql("SELECT DISTINCT weight_version FROM token_versions ORDER BY 1").fetchall()
        assert versions == [(number,) for number in range(4)]
