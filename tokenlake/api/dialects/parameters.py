"""Sampling parameters, and the refusal of what would change the answer and is not built.

What would change the sampled distribution or the rendering is refused by name; what is only a hint is ignored.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Literal, cast

from tokenlake.errors import InvalidInput
from tokenlake.ingest.engine import SamplingParams

__all__ = ["Neutral", "flag", "most_calls", "refuse", "sampling"]

Neutral = Mapping[str, tuple[Any, ...]]
"""Parameters that are accepted only when they change nothing: null, or one of these values."""

_NEUTRAL: Neutral = {
    "n": (1,),
    "logprobs": (False,),
    "top_logprobs": (0,),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
    "min_p": (0,),
    "min_tokens": (0,),
    "logit_bias": ({},),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "functions": ([],),
    "function_call": ("auto", "none"),
    "audio": (),
    "best_of": (1,),
    "use_beam_search": (False,),
    "ignore_eos": (False,),
    "stop_token_ids": ([],),
    "bad_words": ([],),
    "allowed_token_ids": (),
    "prompt_token_ids": (),
    "prompt_embeds": (),
    "prompt_logprobs": (),
    "return_token_ids": (False,),
    "return_tokens_as_token_ids": (False,),
    "skip_special_tokens": (True,),
    "include_stop_str_in_output": (False,),
    "truncate_prompt_tokens": (),
    "echo": (False,),
    "add_generation_prompt": (True,),
    "logits_processors": ([],),
    "chat_template": (),
    "chat_template_kwargs": ({},),
    "continue_final_message": (False,),
    "documents": ([],),
    "structured_outputs": (),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
    "prediction": (),
    "web_search_options": (),
}


def refuse(body: Mapping[str, Any], own: Neutral) -> None:
    """Raise `InvalidInput` for the first parameter that is not neutral; `own` are those of one dialect."""
    for name, value in body.items():
        values = own.get(name, _NEUTRAL.get(name))
        if values is not None and value is not None and not any(_same(value, neutral) for neutral in values):
            raise InvalidInput(f"{name} is not supported with this value", field=name)


def sampling(body: Mapping[str, Any], *, limit: tuple[str, ...], stop: str = "stop") -> SamplingParams:
    """The parameters of one generation; `limit` are the names of the token limit, the first that is given counts."""
    limits = (_number(body, name, integer=True, low=1) for name in limit)
    top_p = _number(body, "top_p", low=0, high=1)
    if top_p == 0:
        raise InvalidInput("top_p must be above 0", field="top_p")
    temperature = _number(body, "temperature", low=0, high=2)
    top_k = _number(body, "top_k", integer=True, low=-1)
    seed = _number(body, "seed", integer=True, low=-(2**63), high=2**63 - 1)
    most = next((value for value in limits if value is not None), None)
    return SamplingParams(
        temperature=1.0 if temperature is None else float(temperature),
        top_p=1.0 if top_p is None else float(top_p),
        top_k=0 if top_k is None or top_k < 0 else int(top_k),
        max_tokens=None if most is None else int(most),
        stop=_stop(body.get(stop), stop),
        seed=None if seed is None else int(seed),
    )


def flag(body: Mapping[str, Any], name: str) -> bool:
    """A boolean parameter; False when it is missing or null."""
    value = body.get(name)
    if value is not None and not isinstance(value, bool):
        raise InvalidInput(f"{name} must be true or false", field=name)
    return bool(value)


def most_calls(body: Mapping[str, Any]) -> Literal[0, 1] | None:
    """How many tool calls the answer may hold; what would force one is refused: the policy decides."""
    choice = body.get("tool_choice")
    if choice not in (None, "auto", "none"):
        raise InvalidInput("tool_choice is not supported with this value: a call is never forced", field="tool_choice")
    alone = body.get("parallel_tool_calls") is not None and not flag(body, "parallel_tool_calls")
    return 0 if choice == "none" else 1 if alone else None


def _same(value: object, other: object) -> bool:
    return value == other and isinstance(value, bool) == isinstance(other, bool)


def _number(
    body: Mapping[str, Any], name: str, *, integer: bool = False, low: int, high: int | None = None
) -> float | None:
    value = body.get(name)
    if value is None:
        return None
    kind = "an integer" if integer else "a number"
    if isinstance(value, bool) or not isinstance(value, int if integer else int | float) or not math.isfinite(value):
        raise InvalidInput(f"{name} must be {kind}", field=name)
    if value < low or (high is not None and value > high):
        bounds = f"at least {low}" if high is None else f"from {low} to {high}"
        raise InvalidInput(f"{name} must be {bounds}", field=name)
    return value


def _stop(value: object, name: str) -> tuple[str, ...]:
    if value is None:
        return ()
    texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, list) or not all(isinstance(text, str) and text for text in cast("list[object]", texts)):
        raise InvalidInput(f"{name} must be a non-empty string or an array of them", field=name)
    return tuple(cast("list[str]", texts))
