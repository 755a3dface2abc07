"""Traces in OpenTelemetry: what a call does, whose child it is, and that nothing of it is there without the extra."""

from __future__ import annotations

import re
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any, ClassVar

import pytest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from tests.api.conftest import Door, Opener
from tests.api.test_chat import U5, ask, echo
from tests.api.test_lifecycle import wait_for
from tokenlake.api import serve
from tokenlake.api.otel import OtelTraces
from tokenlake.api.settings import Settings
from tokenlake.api.traces import NO_TRACES
from tokenlake.errors import ConfigError

ROOT = Path(__file__).resolve().parents[2]
TRACE = "0af7651916cd43dd8448eb211c80319c"
PARENT = f"00-{TRACE}-b7ad6b7169203331-01"
CALL = "POST /ng-rollout/{rollout_id}/v1/chat/completions"


@pytest.fixture
def exported() -> InMemorySpanExporter:
    return InMemorySpanExporter()


@pytest.fixture
def traced(opened: Opener, exported: InMemorySpanExporter) -> Iterator[Door]:
    traces = OtelTraces(SimpleSpanProcessor(exported))
    with opened(traces=traces) as door:
        yield door
    traces.close()


def named(exported: InMemorySpanExporter, name: str) -> list[ReadableSpan]:
    return [span for span in exported.get_finished_spans() if span.name == name]


def parent_of(span: ReadableSpan) -> int | None:
    return span.parent and span.parent.span_id


def test_a_call_is_a_child_of_its_agent_and_every_step_of_it_a_child_of_the_call(
    traced: Door, exported: InMemorySpanExporter
) -> None:
    agent = traced.agent(traced.register()[0], default_headers={"traceparent": PARENT})
    first = ask(agent, [U5])
    last = ask(agent, [U5, echo(first), {"role": "user", "content": "again"}])
    traced.client.seal("g_g0", reward=1.0, terminal_response_id=last.id)
    traced.client.publish("g")
    wait_for(traced, lambda: len(named(exported, CALL)) == 2)  # a request ends after its answer has gone
    calls = [event["call_id"] for event in traced.events("call_committed")]
    requests = named(exported, CALL)
    assert [span.kind for span in requests] == [SpanKind.SERVER] * 2
    for request, call_id in zip(requests, calls, strict=True):
        assert request.parent is not None
        assert (f"{request.parent.trace_id:032x}", f"{request.parent.span_id:016x}") == (TRACE, PARENT.split("-")[2])
        assert request.attributes is not None
        assert request.attributes["tokenlake.call_id"] == call_id
        (call,) = [span for span in named(exported, "call") if parent_of(span) == request.context.span_id]
        steps = [span for span in exported.get_finished_spans() if parent_of(span) == call.context.span_id]
        assert [step.name for step in steps] == ["engine", "commit"]
        for step in (call, *steps):
            assert step.attributes is not None
            names = {name: step.attributes[f"tokenlake.{name}"] for name in ("rollout_id", "attempt", "call_id")}
            assert names == {"rollout_id": "g_g0", "attempt": 0, "call_id": call_id}
    assert Counter(span.context.trace_id for span in requests) == {int(TRACE, 16): 2}
    (seal,) = named(exported, "seal")
    assert seal.attributes == {"tokenlake.rollout_id": "g_g0"}
    published = named(exported, "publish")
    assert [span.attributes and span.attributes["tokenlake.group_ids"] for span in published] == ["g"]


def test_a_span_holds_ids_words_and_figures_and_says_of_an_error_only_its_kind(
    traced: Door, exported: InMemorySpanExporter
) -> None:
    rollout = traced.register(n=2)[0]
    ask(traced.agent(rollout), [U5])
    refused = traced.request(
        "POST", "/ng-rollout/g_g0/v1/chat/completions", {"messages": []}, token=rollout["data_capability"]
    )
    assert refused.status_code == 400
    wait_for(traced, lambda: len(named(exported, CALL)) == 2)
    known = {"rollout_id", "attempt", "call_id", "group_id", "group_ids", "dialect", "mode", "cause", "status"}
    known |= {"seconds", "bytes_in", "bytes_out"}
    for span in exported.get_finished_spans():
        assert {name.removeprefix("tokenlake.") for name in span.attributes or ()} <= known
        assert not span.events
        assert span.status.description is None


def test_a_step_that_fails_is_an_error_and_its_message_stays_here(exported: InMemorySpanExporter) -> None:
    traces = OtelTraces(SimpleSpanProcessor(exported))
    with pytest.raises(ValueError, match="secret"), traces.span("step"):
        raise ValueError("secret")
    (span,) = exported.get_finished_spans()
    assert (span.status.status_code, span.status.description, span.events) == (StatusCode.ERROR, None, ())
    assert span.attributes == {"error.type": "ValueError"}
    traces.close()


@pytest.mark.parametrize("header", ["", "nonsense", "00-" + "0" * 32 + "-" + "0" * 16 + "-01"])
def test_a_traceparent_that_is_none_begins_a_trace_of_its_own(
    traced: Door, exported: InMemorySpanExporter, header: str
) -> None:
    traced.http.get("/healthz", headers={"traceparent": header})
    wait_for(traced, lambda: named(exported, "GET /healthz") != [])
    (span,) = named(exported, "GET /healthz")
    assert span.parent is None


def test_without_the_extra_nothing_imports_it_and_asking_for_traces_says_what_to_install() -> None:
    importing = re.compile(r"^\s*(?:from|import) opentelemetry", re.MULTILINE)
    sources = (ROOT / "tokenlake").rglob("*.py")
    assert [path.name for path in sources if importing.search(path.read_text())] == ["otel.py"]
    code = "import sys; sys.modules['opentelemetry'] = None; import tokenlake.api.otel"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert "MissingExtra: traces need OpenTelemetry: pip install 'tokenlake[otel]'" in done.stderr


class _Collector(BaseHTTPRequestHandler):
    """Takes what is exported."""

    got: ClassVar[list[tuple[str, bytes]]] = []

    def do_POST(self) -> None:
        self.got.append((self.path, self.rfile.read(int(self.headers["content-length"]))))
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_: Any) -> None: ...


def test_the_setting_sends_traces_to_its_collector_before_the_service_ends() -> None:
    with HTTPServer(("127.0.0.1", 0), _Collector) as collector:
        threading.Thread(target=collector.serve_forever, daemon=True).start()
        settings = Settings(otlp_endpoint=f"http://127.0.0.1:{collector.server_port}/v1/traces")
        with serve._traces(settings) as traces, traces.span("a step"):
            pass
        collector.shutdown()
    ((path, body),) = _Collector.got
    assert path == "/v1/traces"
    assert b"a step" in body
    with serve._traces(Settings()) as traces:
        assert traces is NO_TRACES
    with pytest.raises(ConfigError, match="otlp_endpoint"):
        Settings(otlp_endpoint="collector:4317")
