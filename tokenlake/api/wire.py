"""Bodies on the wire: bounded, strict JSON in, models at the border and nowhere else."""

from __future__ import annotations

import asyncio
import json
import math
from collections import Counter
from typing import Annotated, Any, TypeVar, cast

from pydantic import BaseModel, ConfigDict, Field, StrictBool, StrictInt, StrictStr, ValidationError
from starlette.requests import Request

from tokenlake.api.settings import Settings
from tokenlake.errors import Deadline, InvalidInput, TooLarge

__all__ = [
    "Body",
    "FailBody",
    "FreezeBody",
    "GroupBody",
    "Number",
    "SealBody",
    "SqlBody",
    "VersionBody",
    "WorkerBody",
    "read_bytes",
    "read_json",
    "read_model",
]

M = TypeVar("M", bound=BaseModel)
_SHOWN = 80
"""Characters of a key that an error repeats."""
Number = Annotated[float, Field(strict=True, allow_inf_nan=False)]
"""A finite JSON number."""


class Body(BaseModel):
    """What every body has in common: unknown fields are refused."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class GroupBody(Body):
    """`PUT /groups/{group_id}`."""

    n: StrictInt = Field(ge=1, le=4096)
    """Rollouts in the group."""
    deadline_s: Number | None = Field(default=None, gt=0, le=1e9)
    """Seconds until the group is published whatever came of it; the policy `group_deadline_s` when absent."""
    purpose: StrictStr = Field(default="train", pattern="^(train|eval)$")
    meta: dict[str, Any] = Field(default_factory=dict[str, Any])
    """Task, data set, harness: kept, never interpreted."""


class FreezeBody(Body):
    """`POST /rollouts/{rollout_id}/freeze`."""

    attempt: StrictInt | None = None
    terminal_response_id: StrictStr | None = None
    terminal_call_id: StrictStr | None = None


class SealBody(Body):
    """`POST /rollouts/{rollout_id}/seal`."""

    reward: Number
    attempt: StrictInt | None = None
    terminal_response_id: StrictStr | None = None
    terminal_call_id: StrictStr | None = None
    scored_text: StrictStr | None = None
    boundary_id: StrictStr | None = None


class FailBody(Body):
    """`POST /rollouts/{rollout_id}/fail`."""

    reason: StrictStr = Field(min_length=1, max_length=200)
    attempt: StrictInt | None = None
    retry: StrictBool = False


class VersionBody(Body):
    """`PUT /weight_version`."""

    version: StrictInt = Field(ge=0, lt=2**63)


class WorkerBody(Body):
    """`PUT /workers/{worker_id}`."""

    url: StrictStr | None = None
    loaded_weight_version: StrictInt | None = Field(default=None, ge=0, lt=2**63)
    meta: dict[str, Any] = Field(default_factory=dict[str, Any])


class SqlBody(Body):
    """`POST /sql`."""

    sql: StrictStr = Field(min_length=1, max_length=262_144)
    params: list[Any] = Field(default_factory=list[Any])


async def read_bytes(request: Request, settings: Settings) -> bytes:
    """A request body as it came.

    Raises `TooLarge` as soon as more than `max_body_bytes` are announced or arrive, `Deadline` when it comes slowly.
    """
    max_bytes, seconds = settings.max_body_bytes, settings.body_deadline_s
    announced = request.headers.get("content-length", "")
    if announced.isdigit() and int(announced) > max_bytes:
        raise TooLarge(f"the body is larger than {max_bytes} bytes", limit=max_bytes)
    chunks: list[bytes] = []
    size = 0
    try:
        async with asyncio.timeout(seconds):
            async for chunk in request.stream():
                size += len(chunk)
                if size > max_bytes:
                    raise TooLarge(f"the body is larger than {max_bytes} bytes", limit=max_bytes)
                chunks.append(chunk)
    except TimeoutError as error:
        raise Deadline(f"the body did not arrive within {seconds:g} s") from error
    return b"".join(chunks)


async def read_json(request: Request, settings: Settings) -> dict[str, Any]:
    """The JSON object of a request body.

    Raises `TooLarge` as `read_bytes` does, `InvalidInput` for anything that is not a JSON object (also for NaN and
    infinities, which are not JSON, and for numbers that only an infinity could stand for) and for a key that an object
    has twice, of which another reader might take the other value.
    """
    try:
        value = json.loads(
            await read_bytes(request, settings) or b"{}",
            parse_constant=_no_constant,
            parse_float=_finite,
            object_pairs_hook=_each_once,
        )
    except (ValueError, RecursionError) as error:
        raise InvalidInput("the body is not valid JSON") from error
    if not isinstance(value, dict):
        raise InvalidInput("the body must be a JSON object")
    return cast("dict[str, Any]", value)


async def read_model(request: Request, model: type[M], settings: Settings) -> M:
    """A request body as one of the models above; raises `InvalidInput` naming the first field that is wrong."""
    body = await read_json(request, settings)
    try:
        json.dumps(body, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise InvalidInput("the body holds half a surrogate pair, which is not text") from error
    try:
        return model.model_validate(body)
    except ValidationError as error:
        first = error.errors(include_input=False, include_url=False, include_context=False)[0]
        field = ".".join(map(str, first["loc"]))
        raise InvalidInput(f"{field}: {first['msg']}", field=field) from error


def _each_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        twice = next(key for key, count in Counter(key for key, _ in pairs).items() if count > 1)
        shown = ascii(twice[:_SHOWN])[1:-1]
        raise InvalidInput(f"an object of the body has the key {shown} twice", field=shown)
    return found


def _finite(text: str) -> float:
    value = float(text)
    if math.isinf(value):
        raise ValueError(text)
    return value


def _no_constant(name: str) -> None:
    raise ValueError(name)
