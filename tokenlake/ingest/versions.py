"""Weight versions from the labels that a serving engine puts on its weights."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, cast

from tokenlake.errors import Conflict, InvalidInput

__all__ = ["Versions", "next_version", "stamped", "version_of"]


class Versions(NamedTuple):
    """Which weights sampled one generation."""

    first: int | None
    """At the first sampled token; None is unknown, never 0."""
    last: int | None
    spans: list[tuple[int, int, int]] | None
    """`(version, start, end)` over all sampled tokens; None when any of them is unknown."""


def version_of(label: object) -> int | None:
    """The trainer's integer in a label; None for a label that is no whole number."""
    text = str(label)
    return int(text) if text.isascii() and text.isdigit() and len(text) < 19 else None


def stamped(spans: Sequence[tuple[object, int, int]]) -> Versions:
    """From an engine's spans `(label, start, end)`; none at all is unknown."""
    known = [(version_of(label), start, end) for label, start, end in spans]
    if not known:
        return Versions(None, None, None)
    whole = all(version is not None for version, _, _ in known)
    return Versions(known[0][0], known[-1][0], cast("list[tuple[int, int, int]]", known) if whole else None)


def next_version(said: object, loaded: int | None) -> int:
    """The version of the weights that a trainer says it has loaded.

    Raises `InvalidInput` where it is none, and `Conflict` where it goes back.
    """
    if type(said) is not int or not 0 <= said < 2**63:
        raise InvalidInput("version must be a whole number, 0 or more", field="version")
    if loaded is not None and said < loaded:
        raise Conflict(f"version {said} is older than {loaded}")
    return said
