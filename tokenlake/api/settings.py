"""Settings of the service, each with an owner, a unit, a default and a sentence; the only reader of the environment.

What decides about rows (the policies) is recorded in the lake itself; these only shape the process that serves it.
"""

from __future__ import annotations

import math
import os
import re
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal, get_args
from urllib.parse import urlsplit

from tokenlake.errors import ConfigError
from tokenlake.ingest.engine import SamplingParams

__all__ = ["Environment", "LogFormat", "Settings", "child_environment", "no_colour", "read_environment"]

LogFormat = Literal["text", "json"]
Reasoning = Literal["field", "fold"]
LogprobMode = Literal["raw", "processed"]
RetainUntil = Literal["closed", "consumed"]
_WORDS: dict[str, tuple[str, ...]] = {
    "log_format": get_args(LogFormat),
    "reasoning": get_args(Reasoning),
    "upstream_logprobs": get_args(LogprobMode),
    "retain_until": get_args(RetainUntil),
}
"""Settings that are one of some words."""
_WHOLE = (
    "finalizer_actors",
    "pin_top_k",
    "rollout_requests_per_minute",
    "service_requests_per_minute",
    "retain_versions",
)


def _about(owner: str, unit: str, sentence: str) -> dict[str, str]:
    return {"owner": owner, "unit": unit, "sentence": sentence}


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """How one service runs."""

    max_body_bytes: int = field(
        default=33_554_432, metadata=_about("app", "bytes", "A request body beyond this is refused with 413.")
    )
    body_deadline_s: float = field(
        default=30.0, metadata=_about("app", "seconds", "A request body that arrives more slowly is answered with 504.")
    )
    call_deadline_s: float = field(
        default=600.0, metadata=_about("gate", "seconds", "A longer model call is aborted and answered with 504.")
    )
    control_deadline_s: float = field(
        default=30.0, metadata=_about("app", "seconds", "An own route that takes longer is answered with 504.")
    )
    seal_wait_s: float = field(
        default=10.0,
        metadata=_about("control", "seconds", "How long a seal waits for calls in flight before `incomplete`."),
    )
    rollout_ttl_s: float = field(
        default=3600.0,
        metadata=_about("control", "seconds", "An attempt this long without a call fails as never sealed."),
    )
    tick_s: float = field(
        default=1.0, metadata=_about("service", "seconds", "How often deadlines and times to live are looked at.")
    )
    finalizer_actors: int | None = field(
        default=None,
        metadata=_about(
            "finalizer", "Ray actors", "How many judge the groups that are due; none: the service does it itself."
        ),
    )
    prefix_cache_bytes: int = field(
        default=67_108_864,
        metadata=_about("gate", "bytes", "Memory for parents' exact ids; what is evicted is read again."),
    )
    answer_cache: int = field(
        default=1024,
        metadata=_about("gate", "answers", "Answers kept in memory for retries; older ones are read again."),
    )
    rollout_requests_per_minute: int | None = field(
        default=None,
        metadata=_about("limits", "requests", "More under one rollout's prefix are refused with 429; none: no limit."),
    )
    service_requests_per_minute: int | None = field(
        default=None,
        metadata=_about(
            "limits", "requests", "More under all rollouts' prefixes are refused with 429; none: no limit."
        ),
    )
    max_in_flight: int = field(
        default=1024,
        metadata=_about("limits", "model calls", "More at a time, their bodies included, are refused with 429."),
    )
    min_free_bytes: int = field(
        default=134_217_728,
        metadata=_about(
            "store", "bytes", "With less free on the lake's disk calls are refused with 503; reading goes on."
        ),
    )
    pin_temperature: float | None = field(
        default=None,
        metadata=_about("gate", "0 to 2", "Sample every call at this temperature, whatever it asks for."),
    )
    pin_top_p: float | None = field(
        default=None,
        metadata=_about("gate", "above 0, to 1", "Sample every call with this top_p, whatever it asks for."),
    )
    pin_top_k: int | None = field(
        default=None,
        metadata=_about("gate", "tokens, 0 is off", "Sample every call with this top_k, whatever it asks for."),
    )
    closed_groups: int = field(
        default=1024,
        metadata=_about("control", "groups", "Closed groups kept in memory; others are read again when asked for."),
    )
    strip_patterns: tuple[str, ...] = field(
        default=(),
        metadata=_about("gate", "regular expressions", "Removed from system text before hashing and rendering."),
    )
    reasoning: Reasoning = field(
        default="field", metadata=_about("gate", "word", "Serve reasoning as a `field` or `fold` it into content.")
    )
    stream_keep_alive_s: float = field(
        default=15.0, metadata=_about("gate", "seconds", "A streamed answer says something at least this often.")
    )
    log_format: LogFormat = field(
        default="text",
        metadata=_about("serve", "word", "Log lines as `text`, or one `json` object a line."),
    )
    otlp_endpoint: str | None = field(
        default=None,
        metadata=_about("serve", "URL", "Where OpenTelemetry traces go, over OTLP and HTTP; none: nothing is traced."),
    )
    claim_lease_s: float = field(
        default=600.0,
        metadata=_about("replay buffer", "seconds", "When a claim that nobody consumed goes to another member."),
    )
    upstream_deadline_s: float = field(
        default=30.0,
        metadata=_about(
            "upstream", "seconds", "An upstream that does not connect, render or tokenize in time has failed."
        ),
    )
    upstream_logprobs: LogprobMode = field(
        default="raw",
        metadata=_about("upstream", "word", "The `--logprobs-mode` that the upstream runs with: `raw` or `processed`."),
    )
    compact_every_s: float | None = field(
        default=600.0,
        metadata=_about("upkeep", "seconds", "How often compaction and retention run; none: never."),
    )
    compact_min_records: int = field(
        default=1000,
        metadata=_about("upkeep", "records", "Compaction waits for this many small records; what retires does not."),
    )
    retain_closed_s: float | None = field(
        default=None,
        metadata=_about("upkeep", "seconds", "Deltas of a group go this long after it closed; none: age removes none."),
    )
    retain_versions: int | None = field(
        default=None,
        metadata=_about(
            "upkeep",
            "weight versions",
            "Deltas of a group go once its newest version is this far behind the published one; none: no matter.",
        ),
    )
    retain_until: RetainUntil = field(
        default="closed",
        metadata=_about(
            "upkeep", "word", "Which deltas the two above remove: of groups `closed`, or those `consumed` as well."
        ),
    )
    sql_timeout_s: float = field(
        default=10.0,
        metadata=_about("sql", "seconds", "A query of `POST /api/v1/sql` that runs longer is interrupted."),
    )
    sql_max_rows: int = field(
        default=10_000,
        metadata=_about("sql", "rows", "A query answers at most this many rows and says when it had more."),
    )
    sql_max_bytes: int = field(
        default=67_108_864,
        metadata=_about("sql", "bytes", "An answer holds at most this much, and says when there was more."),
    )
    sql_memory_bytes: int = field(
        default=2_147_483_648,
        metadata=_about("sql", "bytes", "Memory of a process that runs queries; one that needs more is refused."),
    )
    sql_processes: int = field(
        default=2, metadata=_about("sql", "processes", "How many queries run at a time; others wait.")
    )
    page_rows: int = field(
        default=256, metadata=_about("rows", "rows or groups", "Most entries of one page, whole groups aside.")
    )

    def __post_init__(self) -> None:
        for item in fields(self):
            value = getattr(self, item.name)
            if item.name in _WORDS:
                if value not in _WORDS[item.name]:
                    raise _wrong(item.name, f"one of {', '.join(_WORDS[item.name])}", value)
            elif item.name == "strip_patterns":
                _patterns(value)
            elif value is None and "None" in str(item.type):
                continue
            elif item.name == "otlp_endpoint":
                if urlsplit(str(value)).scheme not in ("http", "https"):
                    raise _wrong(item.name, "http://host:port/v1/traces", value)
            elif isinstance(value, bool) or not isinstance(value, int | float):
                raise _wrong(item.name, f"a number: {item.metadata['unit']}", value)
            elif (item.name in _WHOLE or isinstance(item.default, int)) and not isinstance(value, int):
                raise _wrong(item.name, f"a whole number of {item.metadata['unit']}", value)
            elif item.name.startswith("pin_"):
                self._check_pin(item.name, item.metadata["unit"], value)
            elif not 0 < value < math.inf:
                raise _wrong(item.name, f"a positive number of {item.metadata['unit']}", value)

    @staticmethod
    def _check_pin(name: str, unit: str, value: float) -> None:
        fits = {"pin_temperature": 0 <= value <= 2, "pin_top_p": 0 < value <= 1, "pin_top_k": 0 <= value < 2**31}
        if not fits[name]:
            raise _wrong(name, unit, value)

    @property
    def pins(self) -> tuple[str, ...]:
        """The settings that pin what calls are sampled from, as far as they are set."""
        return tuple(f.name for f in fields(self) if f.name.startswith("pin_") and getattr(self, f.name) is not None)

    def pinned(self, params: SamplingParams) -> SamplingParams:
        """How a call is sampled that asked for `params`: the run's own distribution, where it is pinned."""
        return replace(
            params,
            temperature=params.temperature if self.pin_temperature is None else float(self.pin_temperature),
            top_p=params.top_p if self.pin_top_p is None else float(self.pin_top_p),
            top_k=params.top_k if self.pin_top_k is None else self.pin_top_k,
        )

    @property
    def strip(self) -> tuple[re.Pattern[str], ...]:
        """The compiled `strip_patterns`."""
        return _patterns(self.strip_patterns)

    @classmethod
    def parse(cls, values: Mapping[str, Any]) -> Settings:
        """Settings from a mapping; raises `ConfigError` for unknown names and wrong values."""
        known = {item.name for item in fields(cls)}
        unknown = sorted(set(values) - known)
        if unknown:
            raise ConfigError(f"unknown settings: {', '.join(unknown)}; known are {', '.join(sorted(known))}")
        given = dict(values)
        if isinstance(given.get("strip_patterns"), list):
            given["strip_patterns"] = tuple(given["strip_patterns"])
        return cls(**given)


def _wrong(name: str, wanted: str, value: object) -> ConfigError:
    return ConfigError(f"setting {name} must be {wanted}, not {value!r}")


def _patterns(values: object) -> tuple[re.Pattern[str], ...]:
    if not isinstance(values, tuple):
        raise ConfigError(f"setting strip_patterns must be a list of regular expressions, not {values!r}")
    try:
        return tuple(re.compile(value) for value in values)  # pyright: ignore[reportUnknownArgumentType, reportUnknownVariableType]
    except (re.error, TypeError) as error:
        raise ConfigError(f"setting strip_patterns holds no regular expression: {error}") from error


@dataclass(frozen=True, slots=True, kw_only=True)
class Environment:
    """What the process's environment says."""

    token: str
    """The control token: `TOKENLAKE_TOKEN`, or a fresh one."""
    token_given: bool
    """Whether the token came from the environment: a fresh one has to be printed."""
    capability_key: str | None
    """`TOKENLAKE_CAPABILITY_KEY`: 64 hex digits."""
    state_dir: Path
    """Where key files lie: `$XDG_STATE_HOME/tokenlake`, by default `~/.local/state/tokenlake`."""
    upstream_key: str | None = None
    """`TOKENLAKE_UPSTREAM_KEY`: what an upstream is sent as `Authorization: Bearer`."""


def child_environment() -> dict[str, str]:
    """What a process that runs queries inherits: everything but what is ours, which is secret."""
    return {name: value for name, value in os.environ.items() if not name.startswith("TOKENLAKE_")}


def no_colour(environ: Mapping[str, str] | None = None) -> bool:
    """Whether the environment asks for text without colour."""
    environ = os.environ if environ is None else environ
    return bool(environ.get("NO_COLOR"))


def read_environment(environ: Mapping[str, str] | None = None) -> Environment:
    """Read the environment once, at start."""
    environ = os.environ if environ is None else environ
    given = environ.get("TOKENLAKE_TOKEN") or None
    state = environ.get("XDG_STATE_HOME") or None
    base = Path(state) if state else Path.home() / ".local" / "state"
    return Environment(
        token=given or secrets.token_urlsafe(32),
        token_given=given is not None,
        capability_key=environ.get("TOKENLAKE_CAPABILITY_KEY") or None,
        state_dir=base / "tokenlake",
        upstream_key=environ.get("TOKENLAKE_UPSTREAM_KEY") or None,
    )
