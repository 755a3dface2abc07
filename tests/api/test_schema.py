"""The service against its own schema: what schemathesis makes of it, well-formed or not, is answered as it says.

A long run: `SCHEMA_EXAMPLES=50 pytest tests/api/test_schema.py`.
"""

from __future__ import annotations

import os
import warnings
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings

from tests.api.conftest import TOKEN, Opener
from tests.long import ONLY_LONG

schemathesis = pytest.importorskip("schemathesis")

EXAMPLES = int(os.environ.get("SCHEMA_EXAMPLES", "2"))
CHECKS = ("not_a_server_error", "status_code_conformance", "content_type_conformance", "response_schema_conformance")
PINNED: dict[str, Any] = {
    "deadline": None,
    "derandomize": True,
    "database": None,
    "phases": [Phase.generate],
    "max_examples": EXAMPLES,
    "suppress_health_check": list(HealthCheck),
}


@pytest.mark.parametrize("mode", ["positive", pytest.param("negative", marks=ONLY_LONG)])
def test_every_route_answers_as_its_schema_says(opened: Opener, mode: str) -> None:
    from schemathesis import GenerationMode, checks

    checks.load_all_checks()
    wanted = [checks.CHECKS.get_one(name) for name in CHECKS]
    tried = 0
    with opened(sql_timeout_s=60.0) as door:
        door.register("g7", 2)
        document = door.request("GET", "/api/v1/openapi.json", token=None).json()
        schema = schemathesis.openapi.from_dict(document)
        schema.config.update(base_url=door.url)
        for result in schema.get_all_operations():
            operation = result.ok()
            made = operation.as_strategy(generation_mode=GenerationMode(mode))

            @settings(**PINNED)
            @given(case=made)
            def answers(case: Any) -> None:
                nonlocal tried
                tried += 1
                case.call_and_validate(headers={"Authorization": f"Bearer {TOKEN}"}, checks=wanted)

            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                answers()
        assert door.http.get("/healthz").status_code == 200
    assert tried > 15
