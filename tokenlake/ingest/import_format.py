"""The JSONL import format: one record a line, checked for shape before anything is believed.

Shape is checked here and refuses the file; truth (is the claimed parent the parent?) is not, because a well-formed
record that is false belongs into the lake, where the views name what is wrong with it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from tokenlake.errors import ImportRefused, InvalidInput
from tokenlake.ids import check_call_id, check_group_id, split_rollout_id
from tokenlake.store.delta import Sampling

__all__ = ["CallRecord", "FailRecord", "GroupRecord", "Record", "SealRecord", "converted", "read_records"]


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupRecord:
    """`{"type": "group"}`: a group of `n` rollouts."""

    line: int
    group_id: str
    n: int
    purpose: str
    meta: dict[str, Any] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class CallRecord:
    """`{"type": "call"}`: one captured model call."""

    line: int
    group_id: str
    index: int
    rollout_id: str
    attempt: int
    call_id: str
    prompt_token_ids: list[int] | None
    """The whole prompt; None when only the suffix after the parent was given."""
    prompt_suffix_token_ids: list[int] | None
    generation_token_ids: list[int]
    generation_logprobs: list[float | None] | None
    weight_version: int | None
    weight_version_end: int | None
    response_id: str | None
    parent_given: bool
    """Whether `parent_call_id` is in the record at all: an explicit null claims a root."""
    parent_call_id: str | None
    finish_reason: str | None
    prev_len: int | None
    digest: bytes | None
    extras: dict[str, Any] | None
    sampling: Sampling
    mode: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class SealRecord:
    """`{"type": "seal"}`: the end of a rollout, with its reward and the evidence of its terminal call."""

    line: int
    group_id: str
    index: int
    rollout_id: str
    attempt: int
    reward: float | None
    terminal_call_id: str | None
    terminal_response_id: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class FailRecord:
    """`{"type": "fail"}`: a rollout that ended without a reward."""

    line: int
    group_id: str
    index: int
    rollout_id: str
    attempt: int
    reason: str


Record = GroupRecord | CallRecord | SealRecord | FailRecord


def read_records(path: Path) -> Iterator[Record]:
    """Records of an import file in order; raises `ImportRefused` with the line at the first malformed one."""
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                if line.strip():
                    yield _parse(line, number)
    except OSError as error:
        raise InvalidInput(f"cannot read {path}: {error.strerror}", path=str(path)) from error


def converted(records: Iterable[tuple[int, dict[str, Any]]]) -> Iterator[Record]:
    """Records that were made of another system's file, each with the line it comes from."""
    for number, fields in records:
        try:
            yield _record(fields, number)
        except InvalidInput as error:
            raise _refused(error, number) from error


def _refused(error: InvalidInput, number: int) -> ImportRefused:
    return ImportRefused(f"line {number}: {error.message}; nothing was imported", line=number)


def _record(fields: dict[str, Any], number: int) -> Record:
    kind = fields.pop("type", None)
    parser = _PARSERS.get(kind) if isinstance(kind, str) else None
    if parser is None:
        raise InvalidInput(f"type must be one of {', '.join(_PARSERS)}")
    reader = _Fields(fields)
    record = parser(reader, number)
    reader.nothing_left()
    return record


def _parse(line: bytes, number: int) -> Record:
    try:
        fields = json.loads(line, object_pairs_hook=_no_duplicates)
        if not isinstance(fields, dict):
            raise InvalidInput("a line must be a JSON object")
        return _record(cast("dict[str, Any]", fields), number)
    except InvalidInput as error:
        raise _refused(error, number) from error
    except (json.JSONDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ImportRefused(f"line {number}: not valid JSON; nothing was imported", line=number) from error


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) != len(pairs):
        raise InvalidInput("a key is given twice in one object")
    return fields


class _Fields:
    """Takes typed fields out of one record and complains about what is left."""

    def __init__(self, fields: dict[str, Any]) -> None:
        self._fields = fields

    def has(self, name: str) -> bool:
        return name in self._fields

    def nothing_left(self) -> None:
        if self._fields:
            raise InvalidInput(f"unknown key {min(self._fields)!r}")

    def required(self, name: str) -> Any:
        if name not in self._fields:
            raise InvalidInput(f"{name} is missing")
        return self._fields.pop(name)

    def text(self, name: str) -> str | None:
        value = self._fields.pop(name, None)
        if value is not None and not isinstance(value, str):
            raise InvalidInput(f"{name} must be a string or null")
        return value

    def integer(self, name: str, *, default: int | None = None) -> int | None:
        value = self._fields.pop(name, None)
        if value is None:
            return default
        if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < 2**31:
            raise InvalidInput(f"{name} must be an integer from 0 to 2147483647, or null")
        return value

    def ids(self, name: str) -> list[int] | None:
        value = self._fields.pop(name, None)
        if value is None:
            return None
        items = cast("list[Any]", value) if isinstance(value, list) else [None]
        if not all(type(item) is int and 0 <= item < 2**31 for item in items):
            raise InvalidInput(f"{name} must be a list of integers from 0 to 2147483647")
        return cast("list[int]", items)

    def logprobs(self, name: str) -> list[float | None] | None:
        value = self._fields.pop(name, None)
        if value is None:
            return None
        items = cast("list[Any]", value) if isinstance(value, list) else [""]
        if not all(item is None or type(item) in (int, float) for item in items):
            raise InvalidInput(f"{name} must be a list of numbers or nulls, or null")
        return [None if item is None else _float32(cast("float", item), name) for item in items]

    def mapping(self, name: str) -> dict[str, Any] | None:
        value = self._fields.pop(name, None)
        if value is not None and not isinstance(value, dict):
            raise InvalidInput(f"{name} must be an object or null")
        return cast("dict[str, Any] | None", value)

    def number(self, name: str) -> float | None:
        value = self._fields.pop(name, None)
        if value is None:
            return None
        if type(value) not in (int, float):
            raise InvalidInput(f"{name} must be a number or null")
        return _float(value, name)

    def rollout(self) -> tuple[str, int, str, int]:
        """(group id, index, rollout id, attempt)."""
        rollout = self.required("rollout_id")
        if not isinstance(rollout, str):
            raise InvalidInput("rollout_id must be a string")
        group_id, index = split_rollout_id(rollout)
        return group_id, index, rollout, self.integer("attempt", default=0) or 0


def _float(value: float, name: str) -> float:
    try:
        return float(value)
    except OverflowError as error:
        raise InvalidInput(f"{name} is too large for a number") from error


def _float32(value: float, name: str) -> float:
    """A finite number beyond float32 cannot be stored as what it is."""
    number = _float(value, name)
    if abs(number) > 3.4028235677973366e38 and abs(number) != float("inf"):
        raise InvalidInput(f"{name} holds a number beyond float32")
    return number


def _group(fields: _Fields, line: int) -> GroupRecord:
    n = fields.integer("n")
    if not n:
        raise InvalidInput("n must be an integer of at least 1")
    purpose = fields.text("purpose") or "train"
    if purpose not in ("train", "eval"):
        raise InvalidInput("purpose must be train or eval")
    return GroupRecord(
        line=line,
        group_id=check_group_id(fields.required("group_id")),
        n=n,
        purpose=purpose,
        meta=fields.mapping("meta"),
    )


def _call(fields: _Fields, line: int) -> CallRecord:
    group_id, index, rollout, attempt = fields.rollout()
    parent_given = fields.has("parent_call_id")
    parent = fields.text("parent_call_id")
    prompt = fields.ids("prompt_token_ids")
    suffix = fields.ids("prompt_suffix_token_ids")
    if (prompt is None) == (suffix is None):
        raise InvalidInput("give prompt_token_ids, or prompt_suffix_token_ids with parent_call_id")
    if suffix is not None and parent is None:
        raise InvalidInput("prompt_suffix_token_ids needs a parent_call_id")
    generation = fields.ids("generation_token_ids")
    if generation is None:
        raise InvalidInput("generation_token_ids is missing")
    weight_version = fields.integer("weight_version")
    mode = fields.text("mode")
    if mode not in (None, "text", "token_in"):
        raise InvalidInput("mode must be text or token_in")
    return CallRecord(
        line=line,
        group_id=group_id,
        index=index,
        rollout_id=rollout,
        attempt=attempt,
        call_id=check_call_id(fields.required("call_id")),
        prompt_token_ids=prompt,
        prompt_suffix_token_ids=suffix,
        generation_token_ids=generation,
        generation_logprobs=fields.logprobs("generation_logprobs"),
        weight_version=weight_version,
        weight_version_end=fields.integer("weight_version_end", default=weight_version),
        response_id=fields.text("response_id"),
        parent_given=parent_given,
        parent_call_id=None if parent is None else check_call_id(parent, "parent_call_id"),
        finish_reason=fields.text("finish_reason"),
        prev_len=fields.integer("prev_len"),
        digest=_digest(fields.text("digest")),
        extras=fields.mapping("extras"),
        sampling=_sampling(fields.mapping("sampling")),
        mode=mode,
    )


def _digest(value: str | None) -> bytes | None:
    if value is None:
        return None
    try:
        raw = bytes.fromhex(value)
    except ValueError:
        raw = b""
    if len(raw) != 32:
        raise InvalidInput("digest must be 64 hexadecimal digits")
    return raw


def _sampling(values: Mapping[str, Any] | None) -> Sampling:
    if values is None:
        return (None, None, None, None)
    fields = _Fields(dict(values))
    mode = fields.text("logprob_mode")
    if mode not in (None, "raw", "processed"):
        raise InvalidInput("sampling.logprob_mode must be raw or processed")
    sampling = (fields.number("temperature"), fields.number("top_p"), fields.integer("top_k"), mode)
    fields.nothing_left()
    return sampling


def _seal(fields: _Fields, line: int) -> SealRecord:
    group_id, index, rollout, attempt = fields.rollout()
    return SealRecord(
        line=line,
        group_id=group_id,
        index=index,
        rollout_id=rollout,
        attempt=attempt,
        reward=fields.number("reward"),
        terminal_call_id=fields.text("terminal_call_id"),
        terminal_response_id=fields.text("terminal_response_id"),
    )


def _fail(fields: _Fields, line: int) -> FailRecord:
    group_id, index, rollout, attempt = fields.rollout()
    reason = fields.text("reason")
    if not reason:
        raise InvalidInput("reason must be a text")
    return FailRecord(line=line, group_id=group_id, index=index, rollout_id=rollout, attempt=attempt, reason=reason)


_PARSERS: dict[str, Callable[[_Fields, int], Record]] = {
    "group": _group,
    "call": _call,
    "seal": _seal,
    "fail": _fail,
}
