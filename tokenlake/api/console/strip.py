"""The tokens of a rollout's chain as they are shown: text, kind, how sure the model was, and what hovering says."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

__all__ = ["LEVELS", "StripCall", "StripToken", "token_strip"]

LEVELS = (-4.0, -2.0, -1.0, -0.5, -0.1, -0.01)
"""Bounds of the colours of a sampled token, the least likely first: level 0 is below all of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StripToken:
    """One token."""

    text: str
    css: str
    """`c` carried, `s l0` to `s l6` sampled."""
    title: str
    breaks: bool
    """Whether a line ends after it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StripCall:
    """The tokens that one call of the chain added."""

    call_id: str
    position: int
    tokens: list[StripToken]


def token_strip(records: Sequence[Mapping[str, Any]], decode: Callable[[int], str]) -> Iterator[StripCall]:
    """Records of `console/tokens` as calls of tokens."""
    for record in records:
        versions = _versions(record)
        tokens: list[StripToken] = []
        triples = zip(record["token_ids"] or [], record["token_mask"] or [], record["logprobs"] or [], strict=False)
        for index, (token_id, mask, logprob) in enumerate(triples, start=record["first"]):
            text = "" if token_id is None else decode(token_id)
            said = f"position {index} · id {token_id}"
            if mask:
                known = "none" if logprob is None else f"{logprob:.4f}"
                said += f" · sampled, logprob {known} · weights {next(versions, '?')}"
            else:
                said += " · carried"
            css = f"s l{bisect_left(LEVELS, logprob if logprob is not None else -1e9)}" if mask else "c"
            tokens.append(StripToken(text=_visible(text), css=css, title=said, breaks="\n" in text))
        yield StripCall(call_id=record["call_id"], position=record["position"], tokens=tokens)


def _versions(record: Mapping[str, Any]) -> Iterator[str]:
    """The weight version of each sampled token from the first one that is shown."""
    version = record["weight_version"]
    spans = record["weight_version_spans"]
    if not spans:
        while True:
            yield "?" if version is None else str(version)
    skipped = record["sampled_before"]
    for span in spans:
        for _ in range(max(span["start"], skipped), span["end"]):
            yield str(span["version"])


def _visible(text: str) -> str:
    return text.replace("\r", "␍").replace("\n", "⏎").replace("\t", "⇥").replace(" ", "\N{NO-BREAK SPACE}") or "∅"
