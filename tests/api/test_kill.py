"""SIGKILL of the service in the middle of open rollouts and streams: nothing acknowledged is lost, nothing is half
there, and they go on exactly."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import openai
import pytest

import tokenlake
from tokenlake.api.cli import main
from tokenlake.api.client import Client
from tokenlake.ingest.tiny.tasks import CALCULATOR_TOOL, FOLLOW_UPS, SYSTEM_PROMPT

TOKEN = "a-control-token-for-this-test"
OPENING = [{"role": "system", "content": SYSTEM_PROMPT}, {"role": "user", "content": "What is 3 + 4?"}]


class Served:
    """`tokenlake serve` as a process of its own."""

    def __init__(self, lake: Path, state: Path) -> None:
        arguments = ["serve", "--lake", str(lake), "--port", "0", "--set", "log_format=json"]
        self._command = [sys.executable, "-m", "tokenlake.api.cli", *arguments]
        self._environment = os.environ | {"TOKENLAKE_TOKEN": TOKEN, "XDG_STATE_HOME": str(state)}
        self.log = state.with_suffix(".log")
        self.start()

    def start(self) -> None:
        with self.log.open("a") as log:
            self.process = subprocess.Popen(
                self._command, env=self._environment, stdout=subprocess.PIPE, stderr=log, text=True
            )
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        self.url = line.rsplit(" ", 1)[-1].strip()
        assert self.url.startswith("http://"), line

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.communicate()


def ask(sdk: openai.OpenAI, messages: list[Any], **more: Any) -> dict[str, Any]:
    completion = sdk.chat.completions.create(
        model="tiny", messages=messages, tools=[CALCULATOR_TOOL], max_tokens=48, **more
    )
    return {"id": completion.id, **completion.choices[0].message.model_dump(exclude_none=True)}


def openai_of(served: Served, slot: dict[str, Any]) -> openai.OpenAI:
    url = f"{served.url}/ng-rollout/{slot['rollout_id']}/v1"
    return openai.OpenAI(base_url=url, api_key=slot["data_capability"], max_retries=0)


@pytest.mark.slow
def test_a_killed_service_loses_nothing_and_open_rollouts_go_on_with_exact_prefixes(tmp_path: Path) -> None:
    served = Served(tmp_path / "lake", tmp_path / "state")
    try:
        with Client(served.url, TOKEN) as control:
            group = control.register_group("g", 3, idempotency_key="once")
        echoes: list[list[Any]] = []
        unanswered: set[str] = set()
        for slot in group["rollouts"]:
            sdk = openai_of(served, slot)
            echoes.append([*OPENING, ask(sdk, OPENING)])
        cut = [openai_of(served, slot) for slot in group["rollouts"][:2]]
        streams = [sdk.chat.completions.create(model="tiny", messages=OPENING, stream=True) for sdk in cut]
        for stream in streams:
            next(stream)
        served.kill()
        for stream in streams:
            with contextlib.suppress(openai.APIConnectionError):
                list(stream)
        served.start()
        with Client(served.url, TOKEN) as control:
            again = control.register_group("g", 3, idempotency_key="once")
            assert [s["data_capability"] for s in again["rollouts"]] == [
                s["data_capability"] for s in group["rollouts"]
            ]
            for slot, echo in zip(again["rollouts"], echoes, strict=True):
                sdk = openai_of(served, slot)
                answer = {key: value for key, value in echo[-1].items() if key != "id"}
                results = [
                    {"role": "tool", "tool_call_id": call["id"], "content": "7"}
                    for call in answer.get("tool_calls", [])
                ]
                last = ask(sdk, [*OPENING, answer, *results, {"role": "user", "content": FOLLOW_UPS[2]}])
                receipt = control.seal(slot["rollout_id"], reward=1.0, terminal_response_id=last["id"])
                assert receipt["poisoned"] is False
                first, *cut_off, last_call = receipt["manifest"]
                assert last_call["parent_call_id"] == first["call_id"]
                assert all(call["mode"] == "text" for call in cut_off), "wholly there or not at all"
                unanswered |= {call["call_id"] for call in cut_off}
            control.publish("g")
    finally:
        served.kill()
    lake = tokenlake.open(tmp_path / "lake")
    assert lake.sql("SELECT count(*), sum(sample_mask) FROM ready_rows").fetchall() == [(3, 3)]
    assert lake.sql("SELECT DISTINCT len(call_ids) FROM ready_rows").fetchall() == [(2,)]
    text = served.log.read_text()
    calls = {line["call_id"]: line for line in map(json.loads, text.splitlines()) if line.get("mode") is not None}
    names = {name: calls[name]["rollout_id"] for name in calls}
    known = dict(lake.sql("SELECT call_id, rollout_id FROM calls").fetchall())
    assert names == {name: known[name] for name in known if name in names or name not in unanswered}
    secrets = [TOKEN, *(slot[f"{role}_capability"] for slot in group["rollouts"] for role in ("data", "control"))]
    logprobs = lake.sql("SELECT DISTINCT unnest(logprobs) FROM deltas").fetchall()
    assert [word for word in [*secrets, *(f"{value:.4f}" for (value,) in logprobs if value)] if word in text] == []
    lake.close()
    assert main(["audit", "--lake", str(tmp_path / "lake")]) == 0
