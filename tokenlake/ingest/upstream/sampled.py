"""Asking an upstream for exact tokens, and checking what comes back.

Two routes take prompt ids and return sampled ids with their log-probabilities: vLLM's `/inference/v1/generate`, which
also says which weights sampled what, and `/v1/completions`, which every server has. Every sampling parameter is sent,
because a server fills in what is missing from its model's own defaults, and what is recorded has to be what was used.

What contradicts itself (the echoed prompt, counts, ids in two forms) is a fault of the generation: its text can still
be served, its ids are never captured, and no shorter record is made of it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

from tokenlake.errors import EngineFailed
from tokenlake.ingest.arrays import TOKEN_PREFIX, token_id
from tokenlake.ingest.engine import FinishReason, Generation, SamplingParams
from tokenlake.ingest.upstream.facts import Route
from tokenlake.ingest.versions import stamped

__all__ = ["PATHS", "distribution", "read_generation", "sampling_body"]

PATHS: dict[Route, str] = {"generate": "/inference/v1/generate", "completions": "/v1/completions"}
_FINISHED: tuple[FinishReason, ...] = ("stop", "length", "abort")


def distribution(params: SamplingParams) -> dict[str, Any]:
    """What decides how a server samples, all of it: what is left out a server may fill from its model's defaults."""
    return {
        "n": 1,
        "temperature": params.temperature,
        "top_p": params.top_p,
        "top_k": params.top_k,
        "min_p": 0.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "repetition_penalty": 1.0,
        "stop": list(params.stop),
        "seed": params.seed,
    }


def sampling_body(
    route: Route, model: str, prompt: Sequence[int], params: SamplingParams, limit: int, **more: Any
) -> dict[str, Any]:
    """The request for one continuation of exactly `prompt`, of `limit` tokens at most."""
    sampling: dict[str, Any] = {
        **distribution(params),
        "max_tokens": limit,
        "logprobs": 0,
        # Markers of tools and thinking are special tokens of some models: the turn is read from them.
        "skip_special_tokens": False,
        **more,
    }
    common = {"model": model, "return_token_ids": True}
    if route == "generate":
        return {**common, "token_ids": list(prompt), "output_mode": "text", "sampling_params": sampling}
    return {**common, "prompt": list(prompt), "return_tokens_as_token_ids": True, **sampling}


def read_generation(route: Route, body: Mapping[str, Any], prompt: Sequence[int]) -> tuple[Generation, int | None]:
    """The generation, and the id that ended it where one did; raises `EngineFailed` when not even a text is there."""
    choices = [_object(item) for item in _array(body.get("choices")) or []]
    choice = choices[0] if choices else {}
    text, finish = choice.get("text"), choice.get("finish_reason")
    if not isinstance(text, str):
        raise EngineFailed("the upstream's answer holds no text", reason="upstream_malformed")
    ids, logprobs, named = _ids(choice.get("token_ids")), *_logprobs(route, choice)
    echo = _ids((body if route == "generate" else choice).get("prompt_token_ids"))
    fault = (
        ("choices_invalid" if len(choices) != 1 or choice.get("index", 0) != 0 else None)
        or _fault_of_ids(ids, named, echo, prompt)
        or _fault_of_usage(body.get("usage"), len(prompt), len(ids or ()))
        or ("logprobs_missing" if ids and logprobs is None else None)
        or ("finish_reason_invalid" if finish not in _FINISHED else None)
    )
    try:
        spans = _spans(choice.get("weight_versions"))
    except ValueError:
        spans, fault = [], fault or "versions_invalid"
    versions = stamped(spans)
    generation = Generation(
        token_ids=ids or [],
        logprobs=cast("list[float]", logprobs or []),
        finish_reason=finish if finish in _FINISHED else "stop",
        text=text,
        weight_version=versions.first,
        weight_version_end=versions.last,
        weight_version_spans=versions.spans,
        stop_sequence=stop if isinstance(stop := choice.get("stop_reason"), str) else None,
        fault=fault,
    )
    return generation, _ended_by(generation, stop)


def _array(value: object) -> list[Any] | None:
    return cast("list[Any]", value) if isinstance(value, list) else None


def _object(value: object) -> dict[str, Any]:
    return cast("dict[str, Any]", value) if isinstance(value, dict) else {}


def _ids(value: object) -> list[int] | None:
    """Ids, also from `token_id:N` texts; None when they are missing, and -1 for one that is no id."""
    array = _array(value)
    return None if array is None else [-1 if (found := token_id(item)) is None else found for item in array]


def _logprobs(route: Route, choice: Mapping[str, Any]) -> tuple[list[float | None] | None, list[int] | None]:
    """The log-probabilities, and the ids they are said to be of where the route says it."""
    fields = _object(choice.get("logprobs"))
    if route == "completions":
        tokens = _array(fields.get("tokens")) or []
        named = all(isinstance(token, str) and token.startswith(TOKEN_PREFIX) for token in tokens)
        return _array(fields.get("token_logprobs")), _ids(tokens) if named and tokens else None
    content = _array(fields.get("content"))
    return None if content is None else [_object(item).get("logprob") for item in content], None


def _fault_of_ids(
    ids: list[int] | None, named: list[int] | None, echo: list[int] | None, prompt: Sequence[int]
) -> str | None:
    if ids is None:
        return "token_ids_missing"
    if -1 in ids:
        return "token_id_invalid"
    if named is not None and len(named) == len(ids) and named != ids:
        return "token_ids_contradict"
    if echo is None:
        return "prompt_ids_missing"
    return None if echo == list(prompt) else "prompt_ids_differ"


def _fault_of_usage(usage: object, prompt: int, sampled: int) -> str | None:
    """The server's own counts; one that is not given contradicts nothing."""
    counts = _object(usage)
    said = (counts.get("prompt_tokens", prompt), counts.get("completion_tokens", sampled))
    return None if said == (prompt, sampled) else "usage_mismatch"


def _spans(value: object) -> list[tuple[object, int, int]]:
    """`(label, start, end)`; ValueError for another shape."""
    if value is None:
        return []
    try:
        return [(item["version"], int(item["start"]), int(item["end"])) for item in cast("list[Any]", value)]
    except (TypeError, KeyError) as error:
        raise ValueError("no weight version spans") from error


def _ended_by(generation: Generation, stop_reason: object) -> int | None:
    """The stop id that ended it: named, or the end of sequence, which vLLM leaves unnamed; None for a stop text."""
    ids = generation.token_ids
    if generation.fault is not None or generation.finish_reason != "stop" or not ids:
        return None
    return ids[-1] if stop_reason is None or stop_reason == ids[-1] else None
