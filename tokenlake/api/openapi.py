"""`GET /api/v1/openapi.json`: own routes with their bodies, queries, errors and an example of each.

Bodies are read by hand, bounded and strict, so FastAPI does not know of them: the models at the border are named here.
"""

from __future__ import annotations

from importlib.metadata import version
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import JSONResponse

from tokenlake.api import routes_claims, routes_control, routes_data
from tokenlake.api.queries import ARROW_STREAM
from tokenlake.api.routes_claims import ClaimBody, ConsumeBody, ReleaseBody, RewindBody
from tokenlake.api.wire import FailBody, FreezeBody, GroupBody, SealBody, SqlBody, VersionBody, WorkerBody

__all__ = ["BODIES", "serve_schema"]

_ROOT = "/api/v1"
_OWN = (routes_control, routes_claims, routes_data)
BODIES: dict[str, tuple[type[BaseModel], dict[str, Any]]] = {
    "put /groups/{group_id}": (GroupBody, {"n": 4, "deadline_s": 600, "purpose": "train", "meta": {"task": "sums"}}),
    "post /rollouts/{rollout_id}/freeze": (FreezeBody, {"terminal_response_id": "chatcmpl-1"}),
    "post /rollouts/{rollout_id}/seal": (SealBody, {"reward": 1.0, "terminal_response_id": "chatcmpl-1"}),
    "post /rollouts/{rollout_id}/fail": (FailBody, {"reason": "environment_failed", "retry": True}),
    "put /weight_version": (VersionBody, {"version": 8}),
    "put /workers/{worker_id}": (WorkerBody, {"url": "http://10.0.0.7:9000", "loaded_weight_version": 8}),
    "post /sql": (SqlBody, {"sql": "SELECT group_id, state FROM groups WHERE n = ?", "params": [4]}),
    "post /claims": (ClaimBody, {"consumer": "trainer", "groups": 2, "current_version": 8, "max_staleness": 2}),
    "post /claims/{claim_id}/consume": (ConsumeBody, {"checkpoint": "step-120"}),
    "post /claims/{claim_id}/release": (ReleaseBody, {}),
    "post /consumers/{name}/rewind": (RewindBody, {"checkpoint": "step-120"}),
}
"""Method and path below `/api/v1` to the model of its body and an example."""

_TEXT = {"type": "string"}
_QUERIES: dict[str, dict[str, Any]] = {
    "get /groups": {"after": _TEXT, "limit": {"type": "integer", "minimum": 1, "maximum": 999_999_999}},
    "get /rows": {
        "group_id": _TEXT,
        "after": _TEXT,
        "limit": {"type": "integer", "minimum": 1, "maximum": 999_999_999},
    },
}
_ARROW = ("get /rows", "post /sql")
_ID = {"type": "string", "pattern": "^[A-Za-z0-9][A-Za-z0-9._:-]{0,199}$", "example": "g7"}
_ROLLOUT = {
    "type": "string",
    "pattern": "^[A-Za-z0-9][A-Za-z0-9._:-]{0,199}_g(0|[1-9][0-9]{0,6})$",
    "example": "g7_g0",
}
_PATH = {"rollout_id": _ROLLOUT, "number": {"type": "integer", "minimum": 0, "maximum": 9_999_999, "example": 1}}
_ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["type", "message", "detail"],
            "properties": {"type": _TEXT, "message": _TEXT, "detail": {"type": "object"}},
        }
    },
}
_REFUSALS = {
    "400": "malformed; `detail.field` names what",
    "401": "no or a wrong credential",
    "403": "a credential that does not reach this far",
    "404": "no such thing",
    "409": "it exists with other content, or its state forbids this",
    "413": "beyond a size limit",
    "429": "too many; `Retry-After` says when",
    "503": "it may work later",
    "504": "a bounded wait ran out",
}


def serve_schema(app: FastAPI) -> None:
    """Add the route. It needs no credential: it says what is in the docs."""
    schema = _schema()

    async def openapi(_: Request) -> JSONResponse:
        return JSONResponse(schema)

    app.add_api_route(f"{_ROOT}/openapi.json", openapi, methods=["GET"], include_in_schema=False)


def _schema() -> dict[str, Any]:
    own = [route for module in _OWN for route in module.router.routes]
    schema = get_openapi(title="Tokenlake", version=version("tokenlake"), routes=own)
    schemas: dict[str, Any] = {"Error": _ERROR}
    for path, methods in schema["paths"].items():
        for method, operation in methods.items():
            _describe(f"{method} {path.removeprefix(_ROOT)}", operation, schemas)
    schema["components"] = {
        "schemas": schemas,
        "securitySchemes": {"bearer": {"type": "http", "scheme": "bearer"}},
    }
    schema["security"] = [{"bearer": []}]
    return schema


def _describe(name: str, operation: dict[str, Any], schemas: dict[str, Any]) -> None:
    parameters = operation.get("parameters", [])
    for parameter in parameters:
        parameter["schema"] = _PATH.get(parameter["name"], _ID)
    queries = _QUERIES.get(name, {})
    parameters += [{"name": each, "in": "query", "schema": kind} for each, kind in queries.items()]
    if parameters:
        operation["parameters"] = parameters
    done: dict[str, Any] = {"application/json": {"schema": {"type": "object"}}}
    if name in _ARROW:
        done[ARROW_STREAM] = {"schema": {"type": "string", "format": "binary"}}
    responses: dict[str, Any] = {"200": {"description": "done", "content": done}}
    if name.startswith(("put /groups", "put /rollouts")):
        responses["201"] = {"description": "registered", "content": done}
    if name == "get /rows":
        responses["304"] = {"description": "the client has these rows: `If-None-Match`"}
    refused = {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}}
    responses |= {status: {"description": why, "content": refused} for status, why in _REFUSALS.items()}
    operation["responses"] = responses
    if name in BODIES:
        model, example = BODIES[name]
        schemas[model.__name__] = model.model_json_schema()
        body = {"schema": {"$ref": f"#/components/schemas/{model.__name__}"}, "example": example}
        operation["requestBody"] = {"required": True, "content": {"application/json": body}}
