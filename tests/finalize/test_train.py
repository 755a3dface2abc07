"""The training loop over the embedded engine, as `make train` runs it, in a few small steps."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.long import ONLY_LONG
from tokenlake import open as open_lake
from tokenlake.api.demo.curves import draw
from tokenlake.api.demo.gauges import gate_metrics
from tokenlake.api.demo.learner import Learner
from tokenlake.api.demo.retokenized import retokenize
from tokenlake.api.demo.solver import Conversation
from tokenlake.api.demo.train import Options, train
from tokenlake.finalize.tensors import Batch
from tokenlake.ingest.tiny import TinyEngine
from tokenlake.ingest.tiny.score import score
from tokenlake.ingest.tiny.tasks import CALCULATOR_TOOL

FLOAT_NOISE = 1e-10
QUESTION = [{"role": "user", "content": "What is 3 + 4?"}]


@pytest.fixture(autouse=True)
def _state_stays_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))


@pytest.mark.slow
@pytest.mark.parametrize("data", ["tokens", pytest.param("text", marks=ONLY_LONG)])
def test_steps_go_on_while_rollouts_do_and_captured_rows_agree_with_their_sampler(tmp_path: Path, data: str) -> None:
    options = Options(steps=3, groups=2, rollouts=4, ahead=3, data=data)
    log = tmp_path / "train.jsonl"
    steps = train(tmp_path / "lake", options, log)
    assert [step["version"] for step in steps] == [0, 1, 2]
    assert all(step["valid_rows"] == step["rows"] == 8 for step in steps)
    assert all(0 <= step["staleness"] <= step["staleness_max"] <= options.max_staleness for step in steps)
    assert steps[0]["same_rows"] == 8
    assert all(step["gate/calls_total.chat,text"] > 0 for step in steps)
    if data == "tokens":
        assert max(step["kl_same"] for step in steps if step["same_rows"]) < FLOAT_NOISE
        assert steps[0]["kl"] == steps[0]["kl_same"]
    with open_lake(tmp_path / "lake") as lake:
        ((consumed, checkpoint),) = lake.sql("SELECT consumed, checkpoint FROM consumers").fetchall()
        assert (consumed, checkpoint) == (6, "step-2")
        spread = lake.sql("SELECT count(DISTINCT weight_version) FROM token_versions").fetchall()
        assert spread[0][0] > 1
    assert [json.loads(line)["step"] for line in log.read_text().splitlines()] == [0, 1, 2]
    draw(tmp_path / "curves.png", {f"{data} 0": steps})
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")


def test_metrics_that_cannot_be_had_are_a_line_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    assert asyncio.run(gate_metrics("http://127.0.0.1:9", "token")) == {}
    assert "training goes on" in caplog.text


@pytest.fixture(scope="module")
def engine() -> TinyEngine:
    return TinyEngine(seed=0)


def batch_of(engine: TinyEngine, answers: list[str]) -> tuple[Batch, dict[str, Conversation]]:
    """Rows of one answer each, as they were captured: ids spelled as given, log-probabilities of the model."""
    prompt = engine.render(QUESTION, [CALCULATOR_TOOL], add_generation_prompt=True)
    rows: list[tuple[list[int], list[float]]] = []
    said: dict[str, Conversation] = {}
    for number, answer in enumerate(answers):
        sampled = [token for part in answer.split("|") for token in engine.encode(part)] + [engine.stop_ids[0]]
        ids = prompt + sampled
        rows.append((ids, score(engine.model.state_dict(), ids).tolist()))
        message = {"role": "assistant", "content": answer.replace("|", "")}
        said[f"g_g{number}"] = Conversation([*QUESTION, message])
    width = max(len(ids) for ids, _ in rows)
    lengths = torch.tensor([len(ids) for ids, _ in rows])
    there = (torch.arange(width)[None] < lengths[:, None]).to(torch.int64)
    mask = there * (torch.arange(width)[None] >= len(prompt))
    fill: Any = lambda values, empty: torch.tensor([[*each, *[empty] * (width - len(each))] for each in values])  # noqa: E731
    count = len(rows)
    return Batch(
        input_ids=fill([ids for ids, _ in rows], engine.pad_id),
        token_mask=mask.float(),
        logprobs=fill([logprobs for _, logprobs in rows], 0.0) * mask,
        weight_versions=mask - 1,
        attention_mask=there,
        position_ids=torch.arange(width)[None] * there,
        sequence_ids=there,
        row_sequence=torch.arange(count),
        row_start=torch.zeros(count, dtype=torch.int64),
        lengths=lengths,
        sample_mask=torch.ones(count),
        rewards=torch.arange(count, dtype=torch.float64),
        weight_version_min=torch.zeros(count, dtype=torch.int64),
        group_index=torch.zeros(count, dtype=torch.int64),
        segment_index=torch.zeros(count, dtype=torch.int64),
        sample_ids=list(said),
        group_ids=["g"],
        reasons=[None] * count,
    ), said


def test_text_gives_the_same_rows_only_where_the_policy_spelled_it_like_the_tokenizer(engine: TinyEngine) -> None:
    batch, said = batch_of(engine, ["Answer: 7", "Ans|wer: 7"])
    made = retokenize(engine, batch, said)
    assert made.differ == 1
    for name in ("input_ids", "token_mask", "logprobs"):
        length = int(batch["lengths"][0])
        assert torch.equal(made.batch[name][0, :length], batch[name][0, :length])
    assert made.batch["logprobs"][1].isnan().sum() == made.batch["token_mask"][1].sum() > 0
    versions = torch.zeros((2, 2), dtype=torch.int64)
    exact, again = (
        Learner(engine.model.config, engine.model.state_dict(), 1e-4, version=0, remembered=1).step(each, versions)
        for each in (batch, made.batch)
    )
    assert exact.same_rows == 2
    assert exact.kl_same < FLOAT_NOISE
    assert again.same_rows == 1


def test_the_wrong_logprobs_are_seen(engine: TinyEngine) -> None:
    batch, _ = batch_of(engine, ["Answer: 7", "Answer: 8"])
    shifted = batch | {"logprobs": batch["logprobs"].roll(1, dims=1) * batch["token_mask"]}
    learner = Learner(engine.model.config, engine.model.state_dict(), 1e-4, version=0, remembered=1)
    assert learner.step(shifted, torch.zeros((2, 2), dtype=torch.int64)).kl_same > 1e-2  # type: ignore[arg-type]
