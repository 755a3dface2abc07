"""The two ways of `bench/ab.py` do the same work: the same rows to the bit, by fewer bytes where agents are."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from bench.ab import Work, by_echo, by_lake, differing
from bench.echo_twin import echoed_row
from tokenlake.ingest.tiny import TinyEngine


def test_a_lake_and_the_echo_path_give_the_same_rows_and_the_lake_spares_the_agents(tmp_path: Path) -> None:
    engine, work = TinyEngine(max_batch=1), Work(groups=1, rollouts=1, checks=2, seed=3)
    lake, echo = by_lake(engine, work, tmp_path), by_echo(engine, work)
    assert min(lake.calls) >= 4
    assert (differing(lake, echo), lake.calls, lake.trained) == ([], echo.calls, echo.trained)
    assert list(lake.rows) == ["ab0_g0"]
    by_agents = (lake.hops["agent to gate"], lake.hops["gate to agent"])
    assert sum(by_agents) < (echo.hops["agent to server"] + echo.hops["server to agent"]) / 2
    # One bit of one log-probability is a difference.
    row = echo.rows["ab0_g0"]
    echo.rows["ab0_g0"] = replace(row, logprobs=bytes([row.logprobs[0] ^ 1]) + row.logprobs[1:])
    assert differing(lake, echo) == ["ab0_g0"]


def test_an_echoed_row_is_refused_where_its_calls_do_not_continue_each_other() -> None:
    first = {"prompt_token_ids": [1], "generation_token_ids": [2], "generation_log_probs": [-0.5]}
    second = {"prompt_token_ids": [1, 2, 3], "generation_token_ids": [4], "generation_log_probs": [-1.0]}
    assert echoed_row([first, second]).input_ids == [1, 2, 3, 4]
    assert echoed_row([first, second]).token_mask == [0, 1, 0, 1]
    with pytest.raises(ValueError, match="no prefix"):
        echoed_row([{**first, "generation_token_ids": [9]}, second])
