"""What an upstream must be able to do, tried at start: each missing ability refuses it, with the flag that gives it.

Everything is proven by asking, nothing is believed from a version number. Which ids end a generation is proven too: an
id that the upstream stops at, when it may sample nothing else, is a stop id. The same answers tell which
log-probabilities come back: those of the model (`raw`), or those after what the request allowed (`processed`).
"""

from __future__ import annotations

import hashlib
import json
from array import array
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn, cast

from tokenlake.errors import ConfigError, Deadline, EngineFailed
from tokenlake.ingest.engine import LogprobMode, SamplingParams
from tokenlake.ingest.upstream.client import UpstreamClient, UpstreamRefused
from tokenlake.ingest.upstream.facts import Route, UpstreamFacts
from tokenlake.ingest.upstream.sampled import PATHS, read_generation, sampling_body

__all__ = ["probe"]

_QUESTION = {"role": "user", "content": "Probe x"}
_ANSWER = {"role": "assistant", "content": "Probe y"}
_MOST_CANDIDATES = 16
_FAULTS = {
    "token_ids_missing": "it returns no token ids: vLLM does from 0.10.2 on, by `return_token_ids`",
    "prompt_ids_missing": "it does not echo the prompt's token ids: vLLM does from 0.10.2 on, by `return_token_ids`",
    "prompt_ids_differ": "it changed the prompt's token ids: what it samples from is not what it is sent",
    "logprobs_missing": "it returns no log-probabilities: start vLLM with --max-logprobs 1 or more",
}


async def probe(client: UpstreamClient, *, logprob_mode: LogprobMode = "raw") -> UpstreamFacts:
    """The facts of the upstream's first model; raises `ConfigError` that says what it cannot do and what would help."""
    try:
        return await _Probe(client).run(logprob_mode)
    except (EngineFailed, Deadline) as error:
        raise ConfigError(error.message, **error.detail) from error
    except UpstreamRefused as error:
        raise ConfigError(f"the upstream {client.url} refuses a probe of its abilities: {error}") from error


class _Probe:
    def __init__(self, client: UpstreamClient) -> None:
        self._client = client
        self._model = ""

    async def run(self, logprob_mode: LogprobMode) -> UpstreamFacts:
        name, length = await self._first_model()
        self._model = name
        prompt, closed = await self._render([_QUESTION], True), await self._render([_QUESTION, _ANSWER], False)
        opening, text = await self._text(prompt), await self._text(closed)
        if await self._encode(text) != closed or await self._encode(opening) != prompt:
            self._refuse("its /tokenize does not give back the ids of its own rendering: exact prompts cannot be built")
        route = await self._route(prompt)
        info = await self._tokenizer_info()
        closing = await self._encode(text.rpartition(str(_ANSWER["content"]))[2])
        candidates = [*closing, *await self._named(info, "eos_token"), *await self._named(info, "pad_token")]
        stops, mode = await self._stops(route, prompt, candidates)
        if mode not in (None, logprob_mode):
            self._refuse(
                f"its log-probabilities are {mode}: start vLLM with --logprobs-mode {logprob_mode}_logprobs, "
                f"or set upstream_logprobs={mode}"
            )
        pads = await self._named(info, "pad_token")
        return UpstreamFacts(
            name=name,
            version=await self._version(),
            max_model_len=length,
            route=route,
            stop_ids=stops,
            pad_id=[*pads, *stops, 0][0],
            logprob_mode=logprob_mode,
            opens_thinking=opening.rstrip().endswith("<think>"),
            tokenizer_digest=None if info is None else _digest(json.dumps(info, sort_keys=True).encode()),
            template_digest=_digest(array("i", prompt).tobytes() + array("i", closed).tobytes()),
        )

    def _refuse(self, why: str) -> NoReturn:
        raise ConfigError(f"the upstream {self._client.url} cannot be captured at the gate: {why}")

    async def _first_model(self) -> tuple[str, int]:
        listed = (await self._client.get("/v1/models")).get("data")
        models = cast("list[dict[str, Any]]", listed) if isinstance(listed, list) else []
        name, length = (models[0].get("id"), models[0].get("max_model_len")) if models else (None, None)
        if not isinstance(name, str) or not isinstance(length, int):
            self._refuse("its /v1/models names no model with a max_model_len, as vLLM's does")
        return name, length

    async def _version(self) -> str | None:
        try:
            said = (await self._client.get("/version")).get("version")
        except EngineFailed:
            return None
        return said if isinstance(said, str) else None

    async def _tokenizer_info(self) -> Mapping[str, Any] | None:
        try:
            return await self._client.get("/tokenizer_info")
        except EngineFailed:
            return None

    async def _named(self, info: Mapping[str, Any] | None, field: str) -> list[int]:
        """The id of a special token that the tokenizer names."""
        text = (info or {}).get(field)
        ids = await self._encode(text) if isinstance(text, str) and text else []
        return ids if len(ids) == 1 else []

    async def _render(self, messages: Sequence[Mapping[str, str]], generation: bool) -> list[int]:
        return await self._tokens({"messages": list(messages), "add_generation_prompt": generation})

    async def _encode(self, text: str) -> list[int]:
        return await self._tokens({"prompt": text, "add_special_tokens": False}) if text else []

    async def _tokens(self, body: dict[str, Any]) -> list[int]:
        tokens = (await self._client.post("/tokenize", {"model": self._model, **body})).get("tokens")
        if (
            not isinstance(tokens, list)
            or not tokens
            or not all(type(token) is int for token in cast("list[Any]", tokens))
        ):
            self._refuse("its /tokenize returns no token ids")
        return cast("list[int]", tokens)

    async def _text(self, ids: list[int]) -> str:
        text = (await self._client.post("/detokenize", {"model": self._model, "tokens": ids})).get("prompt")
        if not isinstance(text, str) or not text:
            self._refuse("its /detokenize returns no text")
        return text

    async def _route(self, prompt: list[int]) -> Route:
        try:
            await self._sample("generate", prompt, 1)
        except EngineFailed as error:
            # vLLM answers 403 for a route that its flags leave out; the credential has been good for others by now.
            if error.detail.get("reason") not in ("upstream_no_route", "upstream_unauthorized"):
                raise
            await self._sample("completions", prompt, 1)
            return "completions"
        return "generate"

    async def _sample(self, route: Route, prompt: list[int], limit: int, **more: Any) -> tuple[int, float, int | None]:
        """How many tokens came, the first one's log-probability, and the stop id."""
        body = sampling_body(route, self._model, prompt, SamplingParams(temperature=0.0), limit, **more)
        generation, ended_by = read_generation(route, await self._client.post(PATHS[route], body), prompt)
        values = cast("list[float | None]", generation.logprobs)
        fault = generation.fault
        if fault is None and (len(values) != len(generation.token_ids) or None in values):
            fault = "logprobs_missing"
        if fault is not None:
            self._refuse(_FAULTS.get(fault, f"what it returns contradicts itself ({fault})"))
        if not generation.token_ids:
            self._refuse("it samples nothing from a prompt of token ids")
        return len(generation.token_ids), generation.logprobs[0], ended_by

    async def _stops(
        self, route: Route, prompt: list[int], candidates: Sequence[int]
    ) -> tuple[tuple[int, ...], LogprobMode | None]:
        """The candidates that end a generation, and which log-probabilities came back, where that could be seen."""
        stops: list[int] = []
        firsts: list[float] = []
        for token in list(dict.fromkeys(candidates))[:_MOST_CANDIDATES]:
            try:
                count, logprob, ended_by = await self._sample(route, prompt, 2, allowed_token_ids=[token])
            except UpstreamRefused:
                continue
            firsts.append(logprob)
            if count == 1 and ended_by == token:
                stops.append(token)
        if len(firsts) < 2:
            return tuple(stops), None
        # Two tokens cannot both be certain, unless each was all that was allowed.
        return tuple(stops), "processed" if all(value == 0.0 for value in firsts) else "raw"


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
