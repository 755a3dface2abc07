"""What capture adds to a call on a real vLLM: three ways to the same process, in pairs, medians.

    .venv/bin/python -m bench.vllm --python .venv-vllm/bin/python

`plain` is vLLM's own chat route; `worker` the captured route beside it, as a gate asks it; `gate` an agent's call
through the gate, which commits it too. Each round asks all of them for the same greedy continuation, in an order that a
seed shuffles; what is added is the median of the differences within a round. The model is so small that the server's
own work is most of a call: the milliseconds say what capture costs, their share says nothing of a real model.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import httpx

from tokenlake.api.client import Client
from tokenlake.api.demo.vllm_policy import vllm_policy
from tokenlake.api.serve import embedded
from tokenlake.api.service import Service
from tokenlake.ids import mint_call_id
from tokenlake.ingest.capture_ask import CALL_PATH, CaptureAsk
from tokenlake.store.lake import OwnedLake

ENDLESS = "calculator"
"""Greedily the model goes on after this until it is stopped."""
TOKENS = 32


def played(http: httpx.Client, rollout: Mapping[str, Any], turns: int) -> list[dict[str, Any]]:
    """A conversation that has gone through the gate for some turns, and its next question."""
    messages: list[dict[str, Any]] = [{"role": "user", "content": ENDLESS}]
    for _ in range(turns):
        body = {"model": "tiny", "messages": messages, "temperature": 0, "max_tokens": TOKENS}
        answer = http.post(f"{rollout['base_url']}/chat/completions", json=body, headers=_key(rollout))
        said = answer.raise_for_status().json()["choices"][0]["message"]["content"]
        messages += [{"role": "assistant", "content": said}, {"role": "user", "content": ENDLESS}]
    return messages


def main() -> None:
    """Print one line a case."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", default=sys.executable, help="an interpreter that has vLLM")
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="tokenlake-bench-"))
    with (
        vllm_policy(arguments.python, folder / "lake", folder, trace=False) as policy,
        OwnedLake.open(folder / "lake") as lake,
        embedded(Service(lake, policy.backend)) as running,
        Client(running.url, running.token) as control,
        httpx.Client(timeout=120) as http,
    ):
        print(policy.title)
        print(f"{'case':34}{'plain ms':>10}{'worker':>10}{'gate':>10}{'+worker':>10}{'+gate':>10}")
        order = random.Random(arguments.seed)
        for turns in (0, 8):
            for stream in (False, True):
                rollout = control.register_group(f"b{turns}{stream}", 1)["rollouts"][0]
                ways = _ways(http, policy.url, rollout, played(http, rollout, turns), stream)
                if turns:
                    del ways["worker"]  # a continued call names its parent's place, which the gate alone knows
                taken: dict[str, list[float]] = {name: [] for name in ways}
                for number in range(arguments.rounds + 5):
                    names = list(ways)
                    order.shuffle(names)
                    for name in names:
                        seconds = ways[name]()
                        if number >= 5:
                            taken[name].append(seconds * 1000)
                _print(f"turn {turns + 1}, {TOKENS} tokens, {'streamed' if stream else 'whole'}", taken)


def _ways(
    http: httpx.Client, url: str, rollout: Mapping[str, Any], messages: list[dict[str, Any]], stream: bool
) -> dict[str, Callable[[], float]]:
    body: dict[str, Any] = {"model": "tiny", "messages": messages, "temperature": 0}
    body |= {"max_completion_tokens": TOKENS, "stream": stream}

    def timed(address: str, said: dict[str, Any], headers: dict[str, str]) -> float:
        began = time.perf_counter()
        answer = http.post(address, json=said, headers=headers)
        seconds = time.perf_counter() - began
        answer.raise_for_status()
        return seconds

    def captured() -> float:
        ask = CaptureAsk(
            rollout_id=rollout["rollout_id"], attempt=0, call_id=mint_call_id(), parent=None, cause="no_history"
        )
        return timed(url + CALL_PATH, {**body, "ng_capture": ask.to_json()}, {})

    return {
        "plain": lambda: timed(f"{url}/v1/chat/completions", body, {}),
        "worker": captured,
        "gate": lambda: timed(f"{rollout['base_url']}/chat/completions", body, _key(rollout)),
    }


def _key(rollout: Mapping[str, Any]) -> dict[str, str]:
    return {"Authorization": f"Bearer {rollout['data_capability']}"}


def _print(case: str, taken: dict[str, list[float]]) -> None:
    cells: list[float | None] = [
        statistics.median(taken[name]) if name in taken else None for name in ("plain", "worker", "gate")
    ]
    cells += [
        statistics.median(other - plain for other, plain in zip(taken[name], taken["plain"], strict=True))
        if name in taken
        else None
        for name in ("worker", "gate")
    ]
    print(f"{case:34}" + "".join(f"{'-' if value is None else f'{value:.2f}':>10}" for value in cells), flush=True)


if __name__ == "__main__":
    main()
