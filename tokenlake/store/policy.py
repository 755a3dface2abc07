"""The policies of a lake: settings that decide about rows and are therefore recorded in lineage (`policy_set`).

Each has an owner, a unit, a default and a sentence; unknown names and values are refused. The views read the last
`policy_set` and take these same defaults where it is silent; a test holds the two equal.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, cast

from tokenlake.errors import ConfigError

__all__ = ["POLICIES", "UNRESOLVED_CAUSES", "Policy", "parse_policy"]

UNRESOLVED_CAUSES = (
    "no_match",
    "preamble_changed",
    "history_edited",
    "ambiguous",
    "splice_failed",
    "prefix_unavailable",
)
"""Why a call that shows model-written turns may still be a root: what `on_unresolved` can be set for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """One policy."""

    name: str
    owner: str
    """The part of Tokenlake that acts on it: `views`, `gate`, `finalizer` or `replay buffer`."""
    unit: str
    default: Any
    sentence: str
    parse: Callable[[Any], Any]
    """From a value or its command-line text to the value; raises `ValueError` with what is allowed."""


def _choice(*allowed: str) -> Callable[[Any], str]:
    def parse(value: Any) -> str:
        if value not in allowed:
            raise ValueError(f"use one of {', '.join(allowed)}")
        return value

    return parse


def _number(value: Any) -> float:
    if isinstance(value, str):
        value = float(value) if value.strip() else math.nan
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError("use a finite number")
    return value


def _fraction(value: Any) -> float:
    number = float(_number(value))
    if not 0 <= number <= 1:
        raise ValueError("use a fraction from 0 to 1")
    return number


def _absent(value: Any) -> bool:
    return value is None or value in ("", "none", "null")


def _seconds(value: Any) -> float | None:
    if _absent(value):
        return None
    number = float(_number(value))
    if number < 0:
        raise ValueError("use seconds, 0 or more, or none")
    return number


def _count(least: int, unit: str) -> Callable[[Any], int | None]:
    def parse(value: Any) -> int | None:
        if _absent(value):
            return None
        number = _number(value)
        if number != int(number) or number < least:
            raise ValueError(f"use a whole number of {unit}, {least} or more, or none")
        return int(number)

    return parse


_action = _choice("root", "poison")


def _by_cause(value: Any) -> Any:
    """One action for all causes, or a mapping (JSON text on the command line) from cause to action."""
    if isinstance(value, str) and value.startswith("{"):
        try:
            value = json.loads(value)
        except json.JSONDecodeError as error:
            raise ValueError("use root, poison, or a JSON object from cause to one of them") from error
    if not isinstance(value, Mapping):
        return _action(value)
    actions = cast("Mapping[Any, Any]", value)
    for cause in actions:
        if cause not in UNRESOLVED_CAUSES:
            raise ValueError(f"unknown cause {cause!r}; known: {', '.join(UNRESOLVED_CAUSES)}")
    return {cause: _action(actions[cause]) for cause in sorted(actions)}


POLICIES: Mapping[str, Policy] = {
    policy.name: policy
    for policy in (
        Policy(
            name="boundary",
            owner="gate",
            unit="off | compat | required",
            default="off",
            sentence="`required`: a seal must name the boundary that its freeze returned; `compat`: one that it names "
            "must be that; `off`: not looked at.",
            parse=_choice("off", "compat", "required"),
        ),
        Policy(
            name="group_deadline_s",
            owner="finalizer",
            unit="seconds after a group's registration, or none",
            default=None,
            sentence="When the places that nobody ended become placeholders, beside a group's own deadline.",
            parse=_seconds,
        ),
        Policy(
            name="max_open_groups",
            owner="replay buffer",
            unit="groups, or none",
            default=None,
            sentence="How many groups to train on may be open; another one is refused with 429 until one has closed.",
            parse=_count(1, "groups"),
        ),
        Policy(
            name="max_staleness",
            owner="replay buffer",
            unit="weight versions, or none",
            default=None,
            sentence="How far a group's oldest version may lie behind a consumer's; beyond it the group is evicted.",
            parse=_count(0, "weight versions"),
        ),
        Policy(
            name="min_delivered_fraction",
            owner="views",
            unit="fraction of the attempt's sampled tokens, 0 to 1",
            default=0.0,
            sentence="A row that holds less of what its attempt sampled becomes the placeholder `undelivered`.",
            parse=_fraction,
        ),
        Policy(
            name="min_valid_fraction_per_group",
            owner="views",
            unit="fraction of N, 0 to 1",
            default=0.0,
            sentence="A group with fewer valid rows is dropped instead of published.",
            parse=_fraction,
        ),
        Policy(
            name="mixed_weight_version",
            owner="views",
            unit="allow | reject",
            default="allow",
            sentence="`reject` turns a row sampled under more than one weight version into a placeholder.",
            parse=_choice("allow", "reject"),
        ),
        Policy(
            name="mixed_weight_version_per_group",
            owner="views",
            unit="allow | reject",
            default="allow",
            sentence="`reject` drops a group whose valid rows were sampled under more than one weight version.",
            parse=_choice("allow", "reject"),
        ),
        Policy(
            name="on_capture_failure",
            owner="gate",
            unit="continue | abort",
            default="continue",
            sentence="Whether the agent still gets the answer of a call that could not be captured.",
            parse=_choice("continue", "abort"),
        ),
        Policy(
            name="on_unresolved",
            owner="gate",
            unit="root | poison, or an object from cause to one of them",
            default="root",
            sentence="What happens to a call whose parent cannot be found: a new root, or a rollout not to train on.",
            parse=_by_cause,
        ),
        Policy(
            name="rows",
            owner="views",
            unit="terminal | segments",
            default="terminal",
            sentence="Whether a rollout is the row of its terminal chain, or every chain with sampled tokens is a row.",
            parse=_choice("terminal", "segments"),
        ),
    )
}
"""Every policy by name, in order of name."""


def parse_policy(settings: Mapping[str, Any]) -> dict[str, Any]:
    """All policies in force under `settings`: parsed values, defaults for those it does not name.

    Values may be typed or text as on the command line. Raises `ConfigError` for an unknown name or a wrong value. The
    result is JSON-able, and parsing it again gives the same.
    """
    unknown = sorted(set(settings) - set(POLICIES))
    if unknown:
        raise ConfigError(f"unknown policy {unknown[0]}: known are {', '.join(POLICIES)}", policy=unknown[0])
    parsed: dict[str, Any] = {}
    for name, policy in POLICIES.items():
        if name not in settings:
            parsed[name] = policy.default
            continue
        try:
            parsed[name] = policy.parse(settings[name])
        except ValueError as error:
            raise ConfigError(f"policy {name} cannot be {settings[name]!r}: {error}", policy=name) from error
    return parsed
