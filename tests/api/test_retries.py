"""The same call again: keys and SDK retries in every dialect, whole and streamed, before and after a restart."""

from __future__ import annotations

from typing import Any

import pytest

from tests.api.conftest import Door, Opener
from tests.api.speakers import SPEAKERS, Speaker
from tests.api.test_dialects import ASK, MORE, THINKING, speaking, streaming
from tests.api.test_refusals import error_of

HEADERS = {"key": {"Idempotency_Key": "k"}, "retry": {"x_stainless_retry_count": "2"}}


def same(one: Any, other: Any) -> bool:
    """Answers but for their time; of streams, the text of every event but for how it was cut."""
    if one.headers["content-type"].startswith("application/json"):
        return {**one.json(), "created": 0, "created_at": 0} == {**other.json(), "created": 0, "created_at": 0}
    return bool(one.text) and one.headers["content-type"] == other.headers["content-type"]


@speaking
@streaming
@pytest.mark.parametrize("how", HEADERS)
def test_a_repeated_call_is_one_call_also_after_a_restart(
    opened: Opener, speaker: type[Speaker], stream: bool, how: str
) -> None:
    with opened() as door:
        (rollout,) = door.register()
        door.engine.answers = [THINKING]
        agent = speaker(door, rollout)
        first = agent.raw([ASK], stream=stream, headers=HEADERS["key"] if how == "key" else {})
        assert same(first, agent.raw([ASK], stream=stream, headers=HEADERS[how]))
        assert len(door.engine.prompts) == 1
    with opened() as door:
        again = speaker(door, rollout)
        assert same(first, again.raw([ASK], stream=stream, headers=HEADERS[how]))
        other_way = again.raw([ASK], stream=not stream, headers=HEADERS[how])
        assert other_way.status_code == 200, "streaming is how an answer travels, not what is asked"
        assert not door.engine.prompts
        (event,) = door.events("call_committed")
        assert event["call_id"] in again.raw([ASK], headers=HEADERS[how]).text
        assert door.client.seal("g_g0", reward=1.0)["reason"] is None


@speaking
@streaming
def test_a_key_stands_for_one_body_of_one_rollout(door: Door, speaker: type[Speaker], stream: bool) -> None:
    first, second = (speaker(door, rollout) for rollout in door.register(n=2))
    one = first.raw([ASK], stream=stream, headers=HEADERS["key"])
    refused = first.raw([MORE], stream=stream, headers=HEADERS["key"])
    assert refused.status_code == 409
    assert "Idempotency-Key" in error_of(speaker, refused)["message"]
    assert refused.headers["x-should-retry"] == "false"
    other = second.raw([MORE], stream=stream, headers=HEADERS["key"])
    assert (one.status_code, other.status_code) == (200, 200)
    assert {event["rollout_id"] for event in door.events("call_committed")} == {"g_g0", "g_g1"}
    assert not door.events("call_failed")


@speaking
@pytest.mark.parametrize("key", ["", "k" * 513])
def test_a_key_that_is_none_is_refused(door: Door, speaker: type[Speaker], key: str) -> None:
    (rollout,) = door.register()
    agent = speaker(door, rollout)
    refused = agent.raw([ASK], headers={"Idempotency_Key": key})
    assert refused.status_code == 400
    assert "Idempotency-Key" in error_of(speaker, refused)["message"]
    assert agent.raw([ASK], headers={"Idempotency_Key": "k" * 512}).status_code == 200
    assert len(door.events("call_committed")) == 1


@speaking
def test_a_key_of_an_ended_or_superseded_attempt_gives_its_answer_or_a_conflict(
    door: Door, speaker: type[Speaker]
) -> None:
    (rollout,) = door.register()
    agent = speaker(door, rollout)
    first = agent.raw([ASK], headers=HEADERS["key"])
    door.client.freeze("g_g0")
    assert same(first, agent.raw([ASK], headers=HEADERS["key"])), "the answer was lost, the call was not"
    door.client.fail("g_g0", reason="environment_failed", retry=True)
    fresh = speaker(door, door.client.register_attempt("g_g0", 1))
    assert agent.raw([ASK], headers=HEADERS["key"]).status_code == 409
    assert not same(first, fresh.raw([ASK], headers=HEADERS["key"])), "another attempt, another call"
    assert len(door.engine.prompts) == 2


@pytest.mark.parametrize(
    ("count", "calls"), [("0", 2), ("00", 2), ("-1", 2), ("one", 2), ("\xb2", 2), ("01", 1), ("9" * 5000, 1)]
)
def test_an_odd_retry_count_breaks_nothing(door: Door, count: str, calls: int) -> None:
    (rollout,) = door.register()
    agent = SPEAKERS[0](door, rollout)
    agent.raw([ASK])
    path = f"{door.url}/ng-rollout/g_g0{agent.path}"
    headers = {
        "Authorization": f"Bearer {rollout['data_capability']}",
        "x-stainless-retry-count": count.encode("latin-1", "replace"),
    }
    answer = door.http.post(path, json=agent.body([ASK], []), headers=headers)
    assert answer.status_code == 200
    assert len(door.engine.prompts) == calls
