"""Run by vLLM's interpreter: an engine that says wrong things, in vLLM's own words, under a worker that captures.

Prints what became of each call as JSON: `[disposition, reason, sampled tokens]`, or the error's name.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import sys
import threading
from array import array
from pathlib import Path
from typing import Any

from vllm import SamplingParams
from vllm.exceptions import RetryableRequestError
from vllm.logprobs import Logprob
from vllm.outputs import CompletionOutput, RequestOutput, WeightVersionSpan

from tokenlake.ingest.capture import CaptureCore
from tokenlake.ingest.capture_ask import CaptureAsk
from tokenlake.ingest.coords import Coords
from tokenlake.ingest.prompter import Prompt
from tokenlake.ingest.vllm.recording import RecordedEngine, Sampled
from tokenlake.ingest.vllm.worker import CaptureWorker
from tokenlake.store.deltas import DeltaWriter
from tokenlake.store.format import create_lake

PROMPT = [1, 2]


def said(ids: list[int], logprobs: Any, *, finish: str | None = "stop", prompt: Any = PROMPT, **more: Any) -> Any:
    """One output of the engine; a log-probability stands for the position of the id beside it."""
    positions = logprobs and [
        None if value is None else {token: Logprob(value)}
        for token, value in zip([*ids, *[0] * len(logprobs)], logprobs, strict=False)
    ]
    piece = CompletionOutput(
        **{"index": 0, "text": "", "token_ids": ids, "cumulative_logprob": None, "logprobs": positions, **more}
    )
    piece.finish_reason = finish
    return RequestOutput("r", None, prompt, None, [piece], finish is not None)


def twice(output: Any) -> Any:
    output.outputs *= 2
    return output


CASES: dict[str, list[Any]] = {
    "sound": [said([3], [-0.1], finish=None), said([9], [-0.2])],
    "no log-probabilities": [said([3, 9], None)],
    "none of one token": [said([3, 9], [-0.1, None])],
    "one too few": [said([3, 9], [-0.1])],
    "one too many": [said([3], [-0.1, -0.2])],
    "not a number": [said([3, 9], [-0.1, math.nan])],
    "no prompt": [said([3, 9], [-0.1, -0.2], prompt=None)],
    "another prompt": [said([3, 9], [-0.1, -0.2], prompt=[1, 4])],
    "an id below zero": [said([3, -1], [-0.1, -0.2])],
    "two choices": [twice(said([3, 9], [-0.1, -0.2]))],
    "the second choice": [said([3, 9], [-0.1, -0.2], index=1)],
    "versions of fewer tokens": [said([3, 9], [-0.1, -0.2], weight_versions=[WeightVersionSpan("7", 0, 1)])],
    "nothing": [said([], [])],
    "past a stop text": [said([3, 71, 72], [-0.1, -0.2, -0.3], stop_reason="x")],
    "aborted": [said([3], [-0.1], finish="abort")],
}


class Engine:
    def __init__(self, outputs: list[Any]) -> None:
        self.outputs = outputs

    async def generate(self, *_: Any, **__: Any) -> Any:
        for output in self.outputs:
            yield output


def recorded(worker: CaptureWorker, number: int, outputs: list[Any], stage: Any = None) -> RecordedEngine:
    ask = CaptureAsk(rollout_id="g_g0", attempt=0, call_id=f"c{number}", parent=None, cause="no_history")
    prompt = Prompt(None, "no_history", array("i", PROMPT), b"")

    def staged(sampled: Sampled) -> Coords:
        return worker._staged(ask, prompt, sampled, (1.0, 1.0, 0, "raw"))

    return RecordedEngine(Engine(outputs), prompt, staged if stage is None else lambda sampled: stage(staged, sampled))


async def drain(engine: RecordedEngine, prompt: Any = PROMPT) -> None:
    async for _ in engine.generate({"prompt_token_ids": prompt}, SamplingParams(), "r"):
        pass


async def outcome(engine: RecordedEngine, prompt: Any = PROMPT) -> list[Any]:
    try:
        await drain(engine, prompt)
    except RetryableRequestError:
        return ["RetryableRequestError", None, None]
    coords = engine.coords
    return ["nothing", None, None] if coords is None else [coords.disposition, coords.reason, coords.sampled_tokens]


async def cut_short(worker: CaptureWorker, number: int) -> list[Any]:
    """The client goes while its call is being staged; the same call once more then meets what was staged."""
    begun, go, done = threading.Event(), threading.Event(), threading.Event()

    def slowly(stage: Any, sampled: Sampled) -> Any:
        begun.set()
        go.wait()
        try:
            return stage(sampled)
        finally:
            done.set()

    call = asyncio.ensure_future(drain(recorded(worker, number, CASES["sound"], slowly)))
    await asyncio.to_thread(begun.wait)
    call.cancel()
    gone = (await asyncio.gather(call, return_exceptions=True))[0]
    go.set()
    await asyncio.to_thread(done.wait)
    return [type(gone).__name__, *(await outcome(recorded(worker, number, CASES["sound"])))]


async def main(lake: Path) -> dict[str, Any]:
    create_lake(lake)
    with contextlib.closing(DeltaWriter(lake, "w0", remember=64)) as writer:
        prompter: Any = type("Prompter", (), {"remember": lambda *_: None})()
        worker = CaptureWorker(
            facts=None,
            chat=None,
            prompter=prompter,
            capture=CaptureCore(writer),
            routing=None,  # type: ignore[arg-type]
        )
        found = {
            name: await outcome(recorded(worker, number, outputs))
            for number, (name, outputs) in enumerate(CASES.items())
        }
        found["a prompt that was changed"] = await outcome(recorded(worker, 100, CASES["sound"]), [1, 2, 3])
        found["cut short while staging"] = await cut_short(worker, 101)
    return found


if __name__ == "__main__":
    sys.stdout.write(json.dumps(asyncio.run(main(Path(sys.argv[1])))) + "\n")
