"""What a service logs: lines with the ids of what was handled, and nothing that nobody may read there."""

from __future__ import annotations

import io
import json
import logging
import re
from collections.abc import Iterator
from typing import Any

import pytest

from tests.api.conftest import TOKEN, Door
from tests.api.test_chat import U5, ask, echo
from tests.api.test_lifecycle import wait_for
from tokenlake.api import logs
from tokenlake.api.trail import note, trail


@pytest.fixture
def lines() -> Iterator[io.StringIO]:
    """Everything that is logged, down to `debug`, as JSON lines."""
    stream = io.StringIO()
    with logs.logging_to(stream, "json"):
        logging.getLogger("tokenlake").setLevel(logging.DEBUG)
        yield stream


def read(stream: io.StringIO) -> list[dict[str, Any]]:
    return [json.loads(line) for line in stream.getvalue().splitlines()]


def test_a_line_of_a_call_says_which_rollout_attempt_and_call_it_was(door: Door, lines: io.StringIO) -> None:
    rollouts = door.register(n=2)
    agent = door.agent(rollouts[0])
    first = ask(agent, [U5])
    ask(agent, [U5, echo(first), {"role": "user", "content": "again"}])
    door.client.seal("g_g0", reward=1.0, terminal_response_id=first.id)
    wait_for(
        door, lambda: lines.getvalue().count("tokenlake.access") == 4
    )  # a request is logged after its answer has gone
    said = [line for line in read(lines) if line["logger"] == "tokenlake.access"]
    calls = [line for line in said if "call_id" in line]
    assert [line["call_id"] for line in calls] == [e["call_id"] for e in door.events("call_committed")]
    assert [(line["rollout_id"], line["attempt"], line["mode"], line["status"]) for line in calls] == [
        ("g_g0", 0, "text", 200),
        ("g_g0", 0, "token_in", 200),
    ]
    assert {line["message"] for line in calls} == {"POST /ng-rollout/{rollout_id}/v1/chat/completions"}
    assert all(line["bytes_in"] > 0 and line["bytes_out"] > 0 and line["seconds"] > 0 for line in calls)
    (seal,) = [line for line in said if line["message"] == "POST /api/v1/rollouts/{rollout_id}/seal"]
    assert seal["rollout_id"] == "g_g0"
    assert "call_id" not in seal  # what one request noted is not said of the next


def test_nothing_of_a_whole_run_leaks_into_its_log(
    door: Door, lines: io.StringIO, monkeypatch: pytest.MonkeyPatch
) -> None:
    rollouts = door.register(n=2, meta={"task": "meta-of-the-group"})
    agent = door.agent(rollouts[0])
    question = {"role": "user", "content": "text-of-an-agent"}
    first = ask(agent, [question])
    door.client.seal("g_g0", reward=0.123456789, terminal_response_id=first.id)
    door.client.fail("g_g1", reason="environment_failed")
    door.client.publish("g")
    for path in ("/api/v1/rows", "/api/v1/audit", "/metrics", "/nowhere/secret-in-a-path?token=secret-in-a-query"):
        door.request("GET", path)
    door.post("/api/v1/sql", {"sql": "SELECT 'text-of-a-query'"})
    door.post("/api/v1/sql", {"sql": "SELECT 'text-of-a-query'"}, token="wrong-credential")
    # A bug of ours, with a traceback: its message may hold anything.
    monkeypatch.setattr(door.service.gate, "_answered", lambda _: 1 / 0)
    refused = door.register("h")[0]
    door.request(
        "POST", "/ng-rollout/h_g0/v1/chat/completions", {"messages": [question]}, token=refused["data_capability"]
    )
    wait_for(door, lambda: lines.getvalue().count('"status": 500') == 1)
    text = lines.getvalue()
    assert "ZeroDivisionError" in text
    assert "tokenlake.access" in text
    secrets = [TOKEN, "wrong-credential", *(r[k] for r in [*rollouts, refused] for k in r if k.endswith("capability"))]
    words = [
        "text-of-an-agent",
        "meta-of-the-group",
        "text-of-a-query",
        "secret-in-a",
        first.choices[0].message.content,
    ]
    assert [word for word in [*secrets, *words] if word in text] == []
    ids, _ = door.ids(door.events("call_committed")[0])
    assert len(ids) > 3
    for line in text.splitlines():
        numbers = [int(n) for n in re.findall(r"\d+", line)]
        assert all(numbers[at : at + 3] != ids[:3] for at in range(len(numbers)))
    assert not re.search(r"-\d+\.\d{3}", text)  # a log-probability, or anything like it


def test_a_traceback_is_one_line_of_json_and_text_lines_name_what_was_noted(lines: io.StringIO) -> None:
    log = logging.getLogger("tokenlake.test")
    with trail():
        note(rollout_id="g_g0", attempt=None)
        try:
            raise ValueError("broken\nin two lines")
        except ValueError:
            log.exception("failed")
        record = log.makeRecord(log.name, logging.INFO, __file__, 1, "a %s", ("word",), None)
        assert logs.TextLines().format(record).endswith(" INFO tokenlake.test a word rollout_id=g_g0")
    (line,) = read(lines)
    assert (line["level"], line["logger"], line["message"]) == ("error", "tokenlake.test", "failed")
    assert line["rollout_id"] == "g_g0"
    assert "attempt" not in line
    assert line["traceback"].endswith("ValueError: broken\nin two lines")
    assert logs.TextLines().format(record).endswith(" a word")  # outside of a trail nothing is noted
