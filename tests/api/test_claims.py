"""Claims over HTTP: the trainer's queue, back-pressure, and what a restart and two clients see."""

from __future__ import annotations

import asyncio

import pytest

from tests.api.conftest import TOKEN, Opener
from tests.api.test_http import published
from tokenlake.api.client import AsyncClient
from tokenlake.errors import Busy, Conflict, NotFound


def names(claim: dict[str, object]) -> list[str]:
    groups = claim["groups"]
    assert isinstance(groups, list)
    return [each["group_id"] for each in groups]


def test_a_trainer_claims_trains_consumes_and_goes_back(opened: Opener) -> None:
    with opened() as door:
        for name in ("g", "h", "i"):
            published(door, 1, name)
        first = door.client.claim("t0", groups=2, current_version=8, max_staleness=2)
        assert names(first) == ["g", "h"]
        assert first["groups"][0] == {"group_id": "g", "n": 1, "group_min_wv": 7, "group_max_wv": 7}
        assert door.client.consume(first["claim_id"], checkpoint="step-1")["checkpoint"] == "step-1"
        second = door.client.claim("t0", idempotency_key="k")
        door.client.release(door.client.claim("t1")["claim_id"])
    with opened() as door:
        assert door.client.claim("t0", idempotency_key="k") == second
        assert door.client.claim("t0")["claim_id"] is None
        assert names(door.client.claim("t1", groups=9)) == ["g", "h", "i"]
        assert door.client.rewind("t0", checkpoint="step-1")["groups"] == ["i"]
        with pytest.raises(Conflict):
            door.client.consume(second["claim_id"], checkpoint="step-2")
        with pytest.raises(NotFound):
            door.client.release("nothing")

        async def again() -> None:
            async with AsyncClient(door.url, TOKEN) as client:
                claim = await client.claim("t0")
                assert names(claim) == ["i"]
                await client.release(claim["claim_id"])
                claim = await client.claim("t0")
                await client.consume(claim["claim_id"], checkpoint="step-2")
                assert (await client.rewind("t0", checkpoint=None))["groups"] == ["g", "h", "i"]

        asyncio.run(again())


def test_a_claim_lasts_as_long_as_the_setting_says(opened: Opener) -> None:
    with opened(claim_lease_s=1e-6) as door:
        published(door, 1)
        assert names(door.client.claim("t0")) == ["g"]
        assert names(door.client.claim("t0", lease_s=60)) == ["g"]
        assert names(door.client.claim("t0")) == []


def test_open_groups_are_bounded_and_each_that_closes_makes_room(opened: Opener) -> None:
    with opened(policy={"max_open_groups": 2}) as door:
        door.register("a", idempotency_key="k")
        door.register("b")
        with pytest.raises(Busy):
            door.register("c")
        refused = door.request("PUT", "/api/v1/groups/c", {"n": 1})
        assert (refused.status_code, refused.json()["error"]["type"], refused.headers["retry-after"]) == (
            429,
            "busy",
            "1",
        )
        assert door.register("a", idempotency_key="k")
        door.register("for-eval", purpose="eval")
        door.client.abort("a")
        door.register("c")
        with pytest.raises(Busy):
            door.register("d")
        door.client.fail("b_g0", reason="environment_failed")
        door.client.publish("b")
        door.register("d")


def test_groups_registered_at_once_do_not_slip_past_the_bound(opened: Opener) -> None:
    with opened(policy={"max_open_groups": 3}) as door:

        async def register(client: AsyncClient, number: int) -> bool:
            try:
                await client.register_group(f"g{number}", 1)
            except Busy:
                return False
            return True

        async def all_at_once() -> list[bool]:
            async with AsyncClient(door.url, TOKEN) as client:
                return await asyncio.gather(*(register(client, number) for number in range(12)))

        assert sum(asyncio.run(all_at_once())) == 3
        assert len(door.events("group_registered")) == 3
