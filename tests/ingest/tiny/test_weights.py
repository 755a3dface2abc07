"""New weights and aborts while requests run.

The weights here never end a turn: greedy decoding over random weights whose stop tokens have a zero embedding goes on
until the context is full, so there is always something to interrupt.
"""

from __future__ import annotations

import asyncio

import pytest
import torch

from tests.ingest.tiny.conftest import Run
from tokenlake.ingest.engine import Generation, SamplingParams
from tokenlake.ingest.tiny import TinyEngine, TinyModel, score, sequence_logprobs

GREEDY = SamplingParams(temperature=0.0)


def endless(engine: TinyEngine, seed: int = 0) -> dict[str, torch.Tensor]:
    torch.manual_seed(seed)
    model = TinyModel(engine.model.config).requires_grad_(False)
    model.embedding.weight[list(engine.stop_ids)] = 0.0
    return model.state_dict()


def test_a_swap_in_mid_request_gives_spans_that_cover_the_tokens(run: Run, prompts: list[list[int]]) -> None:
    async def body(engine: TinyEngine) -> list[Generation]:
        await engine.set_weights(endless(engine), 4)
        running = [
            asyncio.create_task(engine.generate(p, SamplingParams(temperature=0.0, max_tokens=300), request_id=str(i)))
            for i, p in enumerate(prompts[:3])
        ]
        await asyncio.sleep(0)
        await engine.set_weights(endless(engine, seed=1), 5)
        assert engine.weight_version == 5
        await engine.generate(prompts[3], SamplingParams(max_tokens=3), request_id="a few steps under the new weights")
        await engine.set_weights(None, 9)
        return list(await asyncio.gather(*running))

    for generation in run(body):
        spans = generation.weight_version_spans
        assert spans is not None
        assert [version for version, _, _ in spans] == [4, 5, 9]
        assert (generation.weight_version, generation.weight_version_end) == (4, 9)
        assert [spans[0][1], *(end for _, _, end in spans)] == [*(start for _, start, _ in spans), 300]
        assert all(start < end for _, start, end in spans)


def test_the_tokens_before_a_swap_are_those_of_the_old_weights(run: Run, prompts: list[list[int]]) -> None:
    async def body(engine: TinyEngine) -> None:
        old = endless(engine)
        await engine.set_weights(old, 1)
        running = asyncio.create_task(engine.generate(prompts[0], GREEDY, request_id="r"))
        await asyncio.sleep(0)
        await engine.set_weights(endless(engine, seed=1), 2)
        await engine.abort("r")
        generation = await running
        spans = generation.weight_version_spans
        assert spans is not None
        start, end = len(prompts[0]), len(prompts[0]) + spans[0][2]
        scored = score(old, prompts[0] + generation.token_ids, temperature=0.0).tolist()
        assert scored[start:end] == pytest.approx(generation.logprobs[: spans[0][2]], abs=1e-4)

    run(body)


def test_a_version_never_goes_back(run: Run) -> None:
    async def body(engine: TinyEngine) -> None:
        await engine.set_weights(None, 3)
        with pytest.raises(ValueError, match="older than the loaded 3"):
            await engine.set_weights(None, 2)
        with pytest.raises(ValueError, match="0 or more"):
            await engine.set_weights(None, -1)
        await engine.set_weights(None, 3)
        assert engine.weight_version == 3

    run(body)


def test_weights_can_be_set_before_the_start(fresh: TinyEngine, prompts: list[list[int]]) -> None:
    async def body() -> None:
        state = endless(fresh)
        await fresh.set_weights(state, 0)
        assert fresh.weight_version == 0
        assert sequence_logprobs(fresh, prompts[0]) == score(state, prompts[0]).tolist()
        await fresh.set_weights(None, 2)
        with pytest.raises(ValueError, match="older"):
            await fresh.set_weights(None, 1)

    asyncio.run(body())


def test_weights_that_do_not_fit_change_nothing(run: Run, prompts: list[list[int]]) -> None:
    async def body(engine: TinyEngine) -> None:
        before = sequence_logprobs(engine, prompts[0])
        state = engine.model.state_dict()
        name = "norm.weight"
        for bad in (
            {k: v for k, v in state.items() if k != name},
            {**state, "other": state[name]},
            {**state, name: state[name][:-1]},
            {**state, name: state[name].long()},
        ):
            with pytest.raises(ValueError, match="do not fit"):
                await engine.set_weights(bad, 1)
        assert engine.weight_version is None
        assert sequence_logprobs(engine, prompts[0]) == before

    run(body)


def test_loaded_weights_are_a_copy(run: Run, prompts: list[list[int]]) -> None:
    async def body(engine: TinyEngine) -> None:
        state = {name: tensor.clone() for name, tensor in engine.model.state_dict().items()}
        before = sequence_logprobs(engine, prompts[0])
        await engine.set_weights(state, 1)
        for tensor in state.values():
            tensor.zero_()
        assert sequence_logprobs(engine, prompts[0]) == before

    run(body)


def test_an_unknown_version_is_none_and_has_no_spans(run: Run, prompts: list[list[int]]) -> None:
    async def body(engine: TinyEngine) -> Generation:
        return await engine.generate(prompts[0], GREEDY, request_id="r")

    generation = run(body)
    assert (generation.weight_version, generation.weight_version_end) == (None, None)
    assert generation.weight_version_spans is None


def test_abort_gives_what_was_sampled(run: Run, prompts: list[list[int]]) -> None:
    async def body(engine: TinyEngine) -> list[Generation]:
        await engine.set_weights(endless(engine), 1)
        running = [
            asyncio.create_task(engine.generate(p, GREEDY, request_id=str(i))) for i, p in enumerate(prompts[:3])
        ]
        await asyncio.sleep(0)
        for i in (1, 0, 2, 1):
            await engine.abort(str(i))
        await engine.abort("unknown")
        return list(await asyncio.gather(*running))

    for generation in run(body):
        assert generation.finish_reason == "abort"
        assert 1 <= len(generation.token_ids) == len(generation.logprobs) < 1000
        assert generation.weight_version_spans == [(1, 0, len(generation.token_ids))]


def test_a_cancelled_caller_frees_its_slot(prompts: list[list[int]]) -> None:
    async def body() -> None:
        engine = TinyEngine(max_batch=1)
        await engine.start()
        await engine.set_weights(endless(engine), 1)
        running = asyncio.create_task(engine.generate(prompts[0], GREEDY, request_id="a"))
        await asyncio.sleep(0)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        after = await engine.generate(prompts[0], SamplingParams(temperature=0.0, max_tokens=2), request_id="a")
        assert len(after.token_ids) == 2
        await engine.stop()

    asyncio.run(asyncio.wait_for(body(), timeout=60))


def test_stop_aborts_what_runs_and_what_waits(prompts: list[list[int]]) -> None:
    async def body() -> list[Generation]:
        engine = TinyEngine(max_batch=1)
        await engine.start()
        await engine.set_weights(endless(engine), 1)
        running = [
            asyncio.create_task(engine.generate(p, GREEDY, request_id=str(i))) for i, p in enumerate(prompts[:2])
        ]
        await asyncio.sleep(0)
        await engine.stop()
        return list(await asyncio.gather(*running))

    first, second = asyncio.run(asyncio.wait_for(body(), timeout=60))
    assert (first.finish_reason, second.finish_reason) == ("abort", "abort")
    assert first.token_ids
    assert (second.token_ids, second.text, second.weight_version) == ([], "", None)
    assert second.weight_version_spans == []


@pytest.mark.parametrize("ids", [[], [-1], [4096], [1] * 2049])
def test_ids_that_cannot_be_scored_are_refused(idle_engine: TinyEngine, ids: list[int]) -> None:
    with pytest.raises(ValueError, match=r"scored|vocabulary"):
        sequence_logprobs(idle_engine, ids)


def test_one_id_scores_zero(idle_engine: TinyEngine) -> None:
    assert sequence_logprobs(idle_engine.model, [5]) == [0.0]
