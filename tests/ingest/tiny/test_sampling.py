"""The processed distribution and the draw from it."""

from __future__ import annotations

import math

import pytest
import torch

from tokenlake.ingest.engine import SamplingParams
from tokenlake.ingest.tiny.sampling import check_params, draw, processed_logprobs

LOGITS = torch.tensor([[2.0, 1.0, 0.0]])


def one(**params: float) -> list[float]:
    return processed_logprobs(LOGITS, [SamplingParams(**params)])[0].tolist()  # type: ignore[arg-type]


def test_temperature_is_part_of_the_logprob() -> None:
    assert one()[0] == pytest.approx(-0.40761, abs=1e-5)
    assert one(temperature=0.5)[0] == pytest.approx(-0.14293, abs=1e-5)


def test_greedy_reports_the_distribution_at_temperature_1_unfiltered() -> None:
    assert one(temperature=0.0, top_k=1, top_p=0.1) == one()


def test_top_k_keeps_k_and_renormalizes() -> None:
    assert one(top_k=2) == pytest.approx([math.log(1 / (1 + math.e**-1)), math.log(1 / (1 + math.e)), -math.inf])
    assert one(top_k=9) == one()


def test_top_p_keeps_the_token_that_crosses_the_mass() -> None:
    assert one(top_p=0.6)[0] == pytest.approx(0.0)
    assert [math.isfinite(value) for value in one(top_p=0.7)] == [True, True, False]
    assert [math.isfinite(value) for value in one(top_p=1e-9)] == [True, False, False]


def test_rows_have_their_own_parameters() -> None:
    params = [SamplingParams(), SamplingParams(temperature=0.5), SamplingParams(top_k=1), SamplingParams(top_p=0.7)]
    rows = processed_logprobs(LOGITS.repeat(4, 1), params).tolist()
    assert rows == [one(), one(temperature=0.5), one(top_k=1), one(top_p=0.7)]


def test_draws_follow_the_distribution_and_never_take_a_filtered_token() -> None:
    params, generator = SamplingParams(top_k=2), torch.Generator().manual_seed(0)
    rows = processed_logprobs(LOGITS.repeat(4000, 1), [params] * 4000)
    drawn = draw(rows, [params] * 4000, [generator] * 4000)
    assert set(drawn) == {0, 1}
    assert drawn.count(0) / 4000 == pytest.approx(math.exp(one(top_k=2)[0]), abs=0.03)


def test_greedy_takes_the_best_and_draws_nothing() -> None:
    generator = torch.Generator().manual_seed(0)
    before = generator.get_state()
    assert draw(LOGITS.flip(-1), [SamplingParams(temperature=0.0)], [generator]) == [2]
    assert torch.equal(generator.get_state(), before)


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=-1.0),
        SamplingParams(temperature=math.nan),
        SamplingParams(temperature=math.inf),
        SamplingParams(top_p=0.0),
        SamplingParams(top_p=1.5),
        SamplingParams(top_k=-1),
        SamplingParams(max_tokens=0),
        SamplingParams(stop=("",)),
    ],
)
def test_a_parameter_out_of_range_is_refused(params: SamplingParams) -> None:
    with pytest.raises(ValueError, match="must"):
        check_params(params)
