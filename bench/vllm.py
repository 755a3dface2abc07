"""What capture adds to a call on a real vLLM: four ways into the same process, in pairs, medians.

    .venv/bin/python -m bench.vllm --python .venv-vllm/bin/python

`plain` is vLLM's own chat route; `logprobs` the same with the log-probability of each token, which a captured call
asks the engine for; `worker` the captured route beside it, as a gate asks it; `gate` an agent's call through the gate,
which commits it too. Each way plays the same greedy conversations of eight turns, turn by turn with
the others, in an order that a seed shuffles; what is added is the median of the differences inside a turn. The first
round is not counted: every prompt is in vLLM's prefix cache after it, whoever asks. With several in flight, a figure is
the mean of those asked at once. The model is so small that the server's own work is most of a call: the milliseconds
say what capture costs here, their share says nothing of a real model.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import httpx

from tokenlake.api.client import Client
from tokenlake.api.demo.vllm_policy import vllm_policy
from tokenlake.api.serve import embedded
from tokenlake.api.service import Service
from tokenlake.ids import mint_call_id
from tokenlake.ingest.capture_ask import CALL_PATH
from tokenlake.ingest.tiny.tasks import SYSTEM_PROMPTS
from tokenlake.store.lake import OwnedLake

WAYS = ("plain", "logprobs", "worker", "gate")
TURNS, TOKENS = 8, 32
LONG = "\n".join(SYSTEM_PROMPTS * 12)
RECORD = bytes(1536)
"""About what a turn's delta takes."""
_TEXT = re.compile(r'"content": ?"[^"]')


class Answer(NamedTuple):
    """One call: the seconds to its first piece and to its end, and what came."""

    first: float
    whole: float
    text: str
    tokens: int
    report: dict[str, Any] | None


Turn = dict[str, list[Answer]]
"""By way, the answers of those who asked at once."""


class Conversation:
    """A conversation by one of the ways, a turn at a time."""

    def __init__(self, http: httpx.Client, way: str, url: str, rollout: Mapping[str, Any], *, system: str) -> None:
        self._http = http
        self._way = way
        base = {"worker": f"{url}{CALL_PATH}", "gate": f"{rollout['base_url']}/chat/completions"}
        self._address = base.get(way) or f"{url}/v1/chat/completions"
        self._headers = {"Authorization": f"Bearer {rollout['data_capability']}"} if way == "gate" else {}
        self._rollout = rollout["rollout_id"]
        self._messages: list[dict[str, str]] = [{"role": "system", "content": system}]
        self._chain: list[dict[str, Any]] = []

    def turn(self, *, stream: bool) -> Answer:
        """Ask on, and take the answer into the conversation."""
        asked = f"What is {len(self._messages) + 12} + 31?"
        self._messages.append({"role": "user", "content": asked})
        body: dict[str, Any] = {"model": "tiny", "messages": self._messages, "stream": stream}
        body |= {"temperature": 0, "max_completion_tokens": TOKENS}
        if stream and self._way != "worker":
            body["stream_options"] = {"include_usage": True}
        if self._way == "logprobs":
            body |= {"logprobs": True, "top_logprobs": 0}
        if self._way == "worker":
            body["ng_capture"] = self._ask()
        answer = self._streamed(body) if stream else self._posted(body)
        if answer.report is not None:
            coords = answer.report["coords"]
            self._chain.append({name: coords[name] for name in ("call_id", "cum_len", "chain_hash", "place")})
        self._messages.append({"role": "assistant", "content": answer.text})
        return answer

    def _ask(self) -> dict[str, Any]:
        """As the gate would: the worker's own coordinates of the turns before."""
        parent = self._chain[-1] if self._chain else None
        return {
            "rollout_id": self._rollout,
            "attempt": 0,
            "call_id": mint_call_id(),
            "cause": None if parent else "no_history",
            "parent_call_id": parent and parent["call_id"],
            "prev_len": parent["cum_len"] if parent else 0,
            "parent_chain_hash": parent and parent["chain_hash"],
            "parent_messages": len(self._messages) - 1 if parent else 0,
            "chain": self._chain,
        }

    def _posted(self, body: dict[str, Any]) -> Answer:
        began = time.perf_counter()
        answer = self._http.post(self._address, json=body, headers=self._headers)
        seconds = time.perf_counter() - began
        said = answer.raise_for_status().json()
        text = said["choices"][0]["message"]["content"] or ""
        return Answer(seconds, seconds, text, said["usage"]["completion_tokens"], said.get("ng_capture"))

    def _streamed(self, body: dict[str, Any]) -> Answer:
        lines: list[str] = []
        first = 0.0
        began = time.perf_counter()
        with self._http.stream("POST", self._address, json=body, headers=self._headers) as answer:
            for line in answer.iter_lines():
                lines.append(line)
                if not first and _TEXT.search(line):
                    first = time.perf_counter() - began
        seconds = time.perf_counter() - began
        answer.raise_for_status()
        said = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]
        pieces = [choice["delta"].get("content") or "" for event in said for choice in event.get("choices", ())]
        usage = [event["usage"] for event in said if event.get("usage")]
        reports = [event["ng_capture"] for event in said if "ng_capture" in event]
        report = reports[-1] if reports else None
        return Answer(first or seconds, seconds, "".join(pieces), usage[-1]["completion_tokens"], report)


def main() -> None:
    """Print a line a case."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", default=sys.executable, help="an interpreter that has vLLM")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--in-flight", type=int, nargs="+", default=[1, 8], metavar="N")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="tokenlake-bench-"))
    with (
        vllm_policy(arguments.python, folder / "lake", folder, trace=False) as policy,
        OwnedLake.open(folder / "lake") as lake,
        embedded(Service(lake, policy.backend)) as running,
        Client(running.url, running.token) as control,
        httpx.Client(timeout=120, limits=httpx.Limits(max_connections=None)) as http,
    ):
        print(f"{policy.title}; {os.cpu_count()} cores; an append and its sync take {_sync(folder):.2f} ms")
        heads = ("plain ms", *(f"+{way}" for way in WAYS[1:]), *(f"{way}/" for way in WAYS[1:]))
        print(f"{'':44}{''.join(f'{head:>10}' for head in heads)}  pairs, tokens")
        order = random.Random(arguments.seed)
        for in_flight in arguments.in_flight:
            for length, system in (("short", SYSTEM_PROMPTS[0]), ("long", LONG)):
                for stream in (False, True):
                    rounds: list[list[Turn]] = []
                    for number in range(arguments.rounds + 1):
                        group = control.register_group(f"b{in_flight}{length}{stream}{number}", in_flight)
                        rounds.append(_round(http, policy.url, group["rollouts"], system, stream, order))
                    _print(f"{in_flight} in flight, {length} prompt", rounds[1:], stream)


def _round(
    http: httpx.Client,
    url: str,
    rollouts: Sequence[Mapping[str, Any]],
    system: str,
    stream: bool,
    order: random.Random,
) -> list[Turn]:
    """One conversation a rollout and way, all in step; what is asked at once is of one way."""
    playing = {way: [Conversation(http, way, url, each, system=system) for each in rollouts] for way in WAYS}
    turns: list[Turn] = []
    with ThreadPoolExecutor(len(rollouts)) as pool:
        for _ in range(TURNS):
            asked = order.sample(WAYS, len(WAYS))
            turns.append(
                {way: list(pool.map(partial(Conversation.turn, stream=stream), playing[way])) for way in asked}
            )
    return turns


def _print(case: str, rounds: list[list[Turn]], stream: bool) -> None:
    """A line for first turns and one for later ones, of those turns in which all ways sampled equally much."""
    for name, part in (("turn 1", slice(1)), (f"turns 2 to {TURNS}", slice(1, None))):
        turns = [turn for played in rounds for turn in played[part]]
        alike = [turn for turn in turns if len({tuple(each.tokens for each in turn[way]) for way in WAYS}) == 1]
        for what in ("first", "whole") if stream else ("whole",):
            kind = {"first": "first text", "whole": "streamed" if stream else "whole"}[what]
            ms = {
                way: [1000 * statistics.mean(getattr(each, what) for each in turn[way]) for turn in alike]
                for way in WAYS
            }
            pairs = {way: list(zip(ms[way], ms["plain"], strict=True)) for way in WAYS[1:]}
            cells = [statistics.median(ms["plain"])]
            cells += [statistics.median(ours - plain for ours, plain in pairs[way]) for way in WAYS[1:]]
            cells += [statistics.median(ours / plain for ours, plain in pairs[way]) for way in WAYS[1:]]
            figures = "".join(f"{cell:10.2f}" for cell in cells)
            tokens = statistics.mean(each.tokens for turn in alike for each in turn["plain"])
            print(f"{f'{case}, {name}, {kind}':44}{figures}  {len(alike)} of {len(turns)}, {tokens:.0f}", flush=True)


def _sync(folder: Path) -> float:
    """The median of an append of a record and its `fdatasync`, on the lake's disk, in milliseconds."""
    taken: list[float] = []
    with (folder / "sync").open("wb", buffering=0) as file:
        for _ in range(200):
            began = time.perf_counter()
            file.write(RECORD)
            os.fdatasync(file.fileno())
            taken.append(time.perf_counter() - began)
    return statistics.median(taken) * 1000


if __name__ == "__main__":
    main()
