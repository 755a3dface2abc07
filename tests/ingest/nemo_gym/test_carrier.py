"""How a rollout of NeMo-Gym is named in a URL and in a lake."""

from __future__ import annotations

from typing import Any

import pytest

from tokenlake.errors import InvalidInput
from tokenlake.ingest.nemo_gym import gym_rollout_id, lake_place, rollout_base_url


@pytest.mark.parametrize(
    ("body", "name"),
    [
        ({"_ng_rollout_id": "7f_g2", "_ng_task_index": 1, "_ng_rollout_index": 0}, "7f_g2"),
        ({"_ng_rollout_id": "7f_g2", "_ng_attempt_index": 0}, "7f_g2"),
        ({"_ng_rollout_id": "7f_g2", "_ng_attempt_index": 3}, "7f_g2-a3"),
        ({"_ng_task_index": 12, "_ng_rollout_index": 0}, "12-0"),
        ({"_ng_task_index": 12, "_ng_rollout_index": 1, "_ng_attempt_index": 1}, "12-1-a1"),
        ({"_ng_task_index": 12}, None),
        ({}, None),
    ],
)
def test_a_run_body_names_its_rollout(body: dict[str, Any], name: str | None) -> None:
    assert gym_rollout_id(body) == name


@pytest.mark.parametrize("name", ["", "../x", "a/b", "_g0", 7])
def test_a_name_that_nemo_gym_refuses_is_refused(name: Any) -> None:
    with pytest.raises(InvalidInput):
        gym_rollout_id({"_ng_rollout_id": name})


@pytest.mark.parametrize(
    ("name", "place"),
    [
        ("7f_g2", ("7f_g2", 0)),
        ("7f_g2-a3", ("7f_g2", 3)),
        ("12-4", ("12_g4", 0)),
        ("12-4-a1", ("12_g4", 1)),
        ("rollout-1", ("rollout-1_g0", 0)),
        ("7f_g02", ("7f_g02_g0", 0)),
    ],
)
def test_a_rollout_has_one_place_in_a_lake(name: str, place: tuple[str, int]) -> None:
    assert lake_place(name) == place


def test_the_url_of_a_rollout_is_a_door_of_the_gate() -> None:
    body = {"_ng_rollout_id": "7f_g2", "_ng_attempt_index": 1}
    assert rollout_base_url("http://gate:8000/", body) == "http://gate:8000/ng-rollout/7f_g2/training-token-capture/v1"
    assert rollout_base_url("http://gate:8000", {}) is None
