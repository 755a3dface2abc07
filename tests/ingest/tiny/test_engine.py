"""The engine under load: batches, ends of a generation, aborts, seeds, and the trace."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from tests.ingest.tiny.conftest import Run
from tokenlake.errors import ContextOverflow, EngineFailed
from tokenlake.ingest.engine import Engine, Generation, SamplingParams
from tokenlake.ingest.tiny import TinyEngine, sequence_logprobs
from tokenlake.ingest.tiny.engine import WEIGHTS_DIR
from tokenlake.ingest.tiny.requests import Request

GREEDY = SamplingParams(temperature=0.0, max_tokens=60)


def test_it_is_an_engine(idle_engine: TinyEngine) -> None:
    assert isinstance(idle_engine, Engine)
    assert idle_engine.logprob_mode == "processed"
    assert idle_engine.weight_version is None


def test_the_weights_are_small_and_named_by_digest(idle_engine: TinyEngine) -> None:
    assert (WEIGHTS_DIR / "model.safetensors").stat().st_size <= 4_000_000
    digests = idle_engine.digests()
    assert digests.keys() == {"tokenizer", "template", "model"}
    assert all(len(digest) == 64 and int(digest, 16) for digest in digests.values())


def test_a_batch_gives_the_same_greedy_tokens_as_one_at_a_time(run: Run, prompts: list[list[int]]) -> None:
    async def body(engine: TinyEngine) -> tuple[list[Generation], list[Generation]]:
        alone = [await engine.generate(p, GREEDY, request_id=f"a{i}") for i, p in enumerate(prompts)]
        calls = (engine.generate(p, GREEDY, request_id=f"b{i}") for i, p in enumerate(prompts))
        return alone, list(await asyncio.gather(*calls))

    alone, together = run(body)
    assert [g.token_ids for g in together] == [g.token_ids for g in alone]
    for one, other in zip(alone, together, strict=True):
        assert one.logprobs == pytest.approx(other.logprobs, abs=1e-4)


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(),
        SamplingParams(temperature=0.7),
        SamplingParams(temperature=1.3, top_k=20),
        SamplingParams(temperature=0.9, top_p=0.9),
        SamplingParams(temperature=0.0),
    ],
)
def test_logprobs_agree_with_one_full_forward(run: Run, prompts: list[list[int]], params: SamplingParams) -> None:
    async def body(engine: TinyEngine) -> list[Generation]:
        calls = (engine.generate(p, params, request_id=str(i)) for i, p in enumerate(prompts * 2))
        generations = list(await asyncio.gather(*calls))
        for prompt, generation in zip(prompts * 2, generations, strict=True):
            scored = sequence_logprobs(
                engine,
                prompt + generation.token_ids,
                temperature=params.temperature,
                top_p=params.top_p,
                top_k=params.top_k,
            )
            assert scored[0] == 0.0
            assert scored[len(prompt) :] == pytest.approx(generation.logprobs, abs=1e-4)
        return generations

    assert all(len(g.token_ids) == len(g.logprobs) > 0 for g in run(body))


def test_a_sampled_stop_id_is_kept_and_not_in_the_text(run: Run, prompts: list[list[int]]) -> None:
    async def body(engine: TinyEngine) -> Generation:
        return await engine.generate(prompts[0], GREEDY, request_id="r")

    generation = run(body)
    assert generation.finish_reason == "stop"
    assert generation.text.startswith("<tool_call>")
    assert "<|im_end|>" not in generation.text


def test_a_stop_string_cuts_the_text_and_keeps_the_ids(run: Run, prompts: list[list[int]]) -> None:
    async def body(engine: TinyEngine) -> tuple[Generation, Generation]:
        whole = await engine.generate(prompts[0], GREEDY, request_id="a")
        params = SamplingParams(temperature=0.0, stop=("no such text", '"arguments"', "ments"))
        return whole, await engine.generate(prompts[0], params, request_id="b")

    whole, cut = run(body)
    assert cut.finish_reason == "stop"
    assert cut.token_ids == whole.token_ids[: len(cut.token_ids)]
    assert len(cut.token_ids) < len(whole.token_ids)
    assert cut.text == whole.text[: whole.text.index("ments")]


@pytest.mark.parametrize("tokens", [1, 2, 5])
def test_max_tokens_ends_with_length(run: Run, prompts: list[list[int]], tokens: int) -> None:
    async def body(engine: TinyEngine) -> Generation:
        return await engine.generate(prompts[0], SamplingParams(temperature=0.0, max_tokens=tokens), request_id="r")

    generation = run(body)
    assert generation.finish_reason == "length"
    assert len(generation.token_ids) == len(generation.logprobs) == tokens


def test_the_context_ends_with_length(run: Run, fresh: TinyEngine) -> None:
    prompt = [fresh.encode("a")[0]] * (fresh.max_model_len - 1)

    async def body(engine: TinyEngine) -> Generation:
        return await engine.generate(prompt, SamplingParams(temperature=0.0, seed=1), request_id="r")

    assert len(run(body).token_ids) == 1


def test_a_prompt_that_fills_the_context_overflows(run: Run, fresh: TinyEngine) -> None:
    prompt = [fresh.encode("a")[0]] * fresh.max_model_len

    async def body(engine: TinyEngine) -> None:
        with pytest.raises(ContextOverflow) as caught:
            await engine.generate(prompt, GREEDY, request_id="r")
        assert caught.value.detail == {"prompt_len": 2048, "max_model_len": 2048}

    run(body)


@pytest.mark.parametrize("prompt", [[], [-1], [10**6]])
def test_a_bad_prompt_is_refused(run: Run, prompt: list[int]) -> None:
    async def body(engine: TinyEngine) -> None:
        with pytest.raises(ValueError, match=r"prompt|vocabulary"):
            await engine.generate(prompt, GREEDY, request_id="r")

    run(body)


def test_a_request_id_in_use_is_refused_and_free_again_after(run: Run, prompts: list[list[int]]) -> None:
    async def body(engine: TinyEngine) -> None:
        first = asyncio.create_task(engine.generate(prompts[0], GREEDY, request_id="r"))
        await asyncio.sleep(0)
        with pytest.raises(ValueError, match="running already"):
            await engine.generate(prompts[0], GREEDY, request_id="r")
        await first
        await engine.generate(prompts[0], GREEDY, request_id="r")

    run(body)


def test_more_requests_than_slots_wait_their_turn(prompts: list[list[int]]) -> None:
    async def body() -> None:
        engine = TinyEngine(max_batch=2)
        await engine.start()
        calls = (engine.generate(p, GREEDY, request_id=str(i)) for i, p in enumerate(prompts * 2))
        generations = await asyncio.gather(*calls)
        await engine.stop()
        assert [g.token_ids for g in generations[:6]] == [g.token_ids for g in generations[6:]]

    asyncio.run(body())


def test_seeded_sampling_repeats_and_seeds_differ(run: Run, prompts: list[list[int]]) -> None:
    async def body(engine: TinyEngine) -> list[list[int]]:
        seeds = [1, 2, 3, 4, 5, 6, 1]
        calls = (
            engine.generate(prompts[5], SamplingParams(temperature=2.0, seed=s, max_tokens=40), request_id=str(i))
            for i, s in enumerate(seeds)
        )
        return [g.token_ids for g in await asyncio.gather(*calls)]

    first, second = run(body), run(body)
    assert first == second
    assert first[0] == first[-1]
    assert len({tuple(ids) for ids in first}) == 6


def test_the_engine_seed_repeats_a_whole_run(prompts: list[list[int]]) -> None:
    async def body(seed: int) -> list[list[int]]:
        engine = TinyEngine(seed=seed)
        await engine.start()
        params = SamplingParams(temperature=2.0, max_tokens=30)
        calls = (engine.generate(p, params, request_id=str(i)) for i, p in enumerate(prompts))
        ids = [g.token_ids for g in await asyncio.gather(*calls)]
        await engine.stop()
        return ids

    assert asyncio.run(body(3)) == asyncio.run(body(3)) != asyncio.run(body(4))


def test_the_trace_says_what_was_sampled(tmp_path: Path, prompts: list[list[int]]) -> None:
    path = tmp_path / "trace.jsonl"

    async def body() -> list[Generation]:
        engine = TinyEngine(trace_path=path)
        await engine.start()
        await engine.set_weights(None, 3)
        calls = (engine.generate(p, SamplingParams(), request_id=str(i)) for i, p in enumerate(prompts))
        generations = list(await asyncio.gather(*calls))
        await engine.stop()
        return generations

    generations = asyncio.run(body())
    traced = {record["request_id"]: record for record in map(json.loads, path.read_text().splitlines())}
    assert len(traced) == len(prompts)
    for i, (prompt, generation) in enumerate(zip(prompts, generations, strict=True)):
        assert traced[str(i)] == {
            "request_id": str(i),
            "prompt_token_ids": prompt,
            "token_ids": generation.token_ids,
            "logprobs": generation.logprobs,
            "versions": [3] * len(generation.token_ids),
        }


def test_logprobs_are_float32_values(run: Run, prompts: list[list[int]]) -> None:
    import numpy as np

    async def body(engine: TinyEngine) -> Generation:
        return await engine.generate(prompts[1], SamplingParams(), request_id="r")

    logprobs = run(body).logprobs
    assert np.asarray(logprobs, dtype=np.float32).astype(float).tolist() == logprobs


def test_an_engine_that_is_not_running_says_so(fresh: TinyEngine, prompts: list[list[int]]) -> None:
    async def body() -> None:
        with pytest.raises(EngineFailed, match="start"):
            await fresh.generate(prompts[0], GREEDY, request_id="r")
        await fresh.stop()
        await fresh.abort("r")
        for _ in range(2):
            await fresh.start()
            await fresh.start()
            assert (await fresh.generate(prompts[0], GREEDY, request_id="r")).token_ids
            await fresh.stop()
            await fresh.stop()

    asyncio.run(body())


def test_a_trace_that_cannot_be_written_fails_the_request(
    tmp_path: Path, prompts: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("threading.excepthook", lambda _: None)

    async def body() -> None:
        engine = TinyEngine(trace_path=tmp_path / "no such folder" / "trace.jsonl")
        await engine.start()
        with pytest.raises(EngineFailed, match="trace"):
            await asyncio.wait_for(engine.generate(prompts[0], GREEDY, request_id="r"), timeout=60)
        await engine.stop()

    asyncio.run(body())


@pytest.mark.parametrize("where", ["model.prefill", "model.decode", "_scheduler._deliver"])
def test_what_breaks_fails_its_own_requests_and_the_engine_goes_on(
    fresh: TinyEngine,
    prompts: list[list[int]],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    where: str,
) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("no memory")

    async def body() -> None:
        await fresh.start()
        with monkeypatch.context() as patch:
            owner, _, name = where.rpartition(".")
            patch.setattr(getattr(fresh, owner), name, broken)
            calls = (fresh.generate(p, GREEDY, request_id=str(i)) for i, p in enumerate(prompts))
            results = await asyncio.gather(*calls, return_exceptions=True)
        assert [str(result) for result in results] == [
            "the tiny engine broke (RuntimeError): its log says how" for _ in prompts
        ]
        assert fresh.running
        assert (await fresh.generate(prompts[0], GREEDY, request_id="0")).finish_reason == "stop"
        await fresh.stop()

    asyncio.run(body())
    assert "no memory" in caplog.text


def test_one_request_that_breaks_is_the_only_one_that_fails(
    fresh: TinyEngine, prompts: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two run together; the first one's second token breaks it."""
    append = Request.append

    def odd(request: Request, *token: Any) -> None:
        append(request, *token)
        if request.request_id == "odd" and len(request.token_ids) == 2:
            raise RuntimeError("of this one alone")

    async def body() -> None:
        await fresh.start()
        alone = await fresh.generate(prompts[1], GREEDY, request_id="alone")
        monkeypatch.setattr(Request, "append", odd)
        failed, other = await asyncio.gather(
            fresh.generate(prompts[0], GREEDY, request_id="odd"),
            fresh.generate(prompts[1], GREEDY, request_id="even"),
            return_exceptions=True,
        )
        assert isinstance(failed, EngineFailed)
        assert isinstance(other, Generation)
        assert other.token_ids == alone.token_ids
        await fresh.stop()

    asyncio.run(body())


def test_weights_that_cannot_be_loaded_are_told_and_the_engine_goes_on(
    fresh: TinyEngine, prompts: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(_: object) -> None:
        raise RuntimeError("no memory")

    async def body() -> None:
        await fresh.start()
        monkeypatch.setattr(fresh.model, "load", broken)
        with pytest.raises(EngineFailed, match="RuntimeError"):
            await fresh.set_weights(dict(fresh.model.state_dict()), 4)
        assert fresh.weight_version is None
        assert (await fresh.generate(prompts[0], GREEDY, request_id="0")).token_ids
        await fresh.stop()

    asyncio.run(body())


def test_an_engine_whose_thread_ended_says_so_and_can_start_again(
    fresh: TinyEngine, prompts: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("threading.excepthook", lambda _: None)

    def ended(*_: object) -> None:
        raise SystemExit

    async def body() -> None:
        await fresh.start()
        with monkeypatch.context() as patch:
            patch.setattr(fresh.model, "prefill", ended)
            with pytest.raises(EngineFailed, match="SystemExit"):
                await fresh.generate(prompts[0], GREEDY, request_id="r")
        assert not fresh.running
        with pytest.raises(EngineFailed, match="not running"):
            await fresh.generate(prompts[0], GREEDY, request_id="r")
        await fresh.start()
        assert (await fresh.generate(prompts[0], GREEDY, request_id="r")).token_ids
        await fresh.stop()

    asyncio.run(body())
