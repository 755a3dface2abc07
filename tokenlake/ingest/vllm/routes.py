"""The routes that a capture worker adds to vLLM's own. They lie under `/v1`, so `--api-key` guards them."""

from __future__ import annotations

import json
from typing import Any, cast

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from vllm.entrypoints.serve.utils.api_utils import with_cancellation

from tokenlake.errors import Conflict, InvalidInput
from tokenlake.ingest.capture_ask import CALL_PATH, CAPTURE_PATH, WEIGHTS_PATH
from tokenlake.ingest.versions import next_version, version_of
from tokenlake.ingest.vllm.worker import CaptureWorker

__all__ = ["router"]

router = APIRouter()


def _worker(request: Request) -> CaptureWorker:
    return request.app.state.tokenlake_worker


@with_cancellation
async def _answer(body: dict[str, Any], raw_request: Request) -> Response:
    return await _worker(raw_request).call(body, raw_request)


@router.get(CAPTURE_PATH)
async def capture(raw_request: Request) -> JSONResponse:
    """That this server captures, and what it is."""
    return JSONResponse(await _worker(raw_request).health())


@router.post(CALL_PATH)
async def call(raw_request: Request) -> Response:
    """One captured call: a chat completion with `ng_capture`."""
    body = await _object(raw_request)
    # None: the client has gone, and nobody reads this.
    return await _answer(body, raw_request) or Response(status_code=499)


@router.put(WEIGHTS_PATH)
async def weights(raw_request: Request) -> JSONResponse:
    """The trainer says which version the weights are that it has loaded here; never backwards."""
    worker = _worker(raw_request)
    said = (await _object(raw_request)).get("version")
    try:
        version = next_version(said, version_of((await worker.health())["weights"]))
    except InvalidInput as error:
        return _error(400, error.message)
    except Conflict as error:
        return _error(409, error.message)
    await worker.relabel(version)
    return JSONResponse(await worker.health())


async def _object(request: Request) -> dict[str, Any]:
    try:
        body: Any = json.loads(await request.body())
    except (ValueError, RecursionError):
        body = None
    return cast("dict[str, Any]", body) if isinstance(body, dict) else {}


def _error(status: int, message: str) -> JSONResponse:
    return JSONResponse({"error": {"message": message, "type": "invalid_request_error", "code": status}}, status)
