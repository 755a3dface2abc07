"""Traces in OpenTelemetry; the only module that imports it (extra `otel`).

The provider is the service's own, so that two services in one process do not mix. Agents that are traced themselves
send a `traceparent` (W3C Trace Context): their call is the parent of ours.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping
from contextlib import contextmanager

from tokenlake.api.traces import Headers, RequestSpan
from tokenlake.api.trail import Noted, noted
from tokenlake.errors import MissingExtra

try:
    from opentelemetry.context import Context
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.resources import SERVICE_NAME, Resource
    from opentelemetry.sdk.trace import SpanProcessor, TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor
    from opentelemetry.trace import Span, SpanKind, StatusCode
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
except ImportError as error:
    raise MissingExtra("traces need OpenTelemetry: pip install 'tokenlake[otel]'") from error

__all__ = ["OtelTraces", "exporting"]

_PREFIX = "tokenlake."
_W3C = TraceContextTextMapPropagator()


def exporting(endpoint: str) -> OtelTraces:
    """Traces to an OTLP collector at `endpoint`, as `http://host:4318/v1/traces`; sent in the background."""
    return OtelTraces(BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint)))


class OtelTraces:
    """Spans that go to one processor."""

    def __init__(self, processor: SpanProcessor) -> None:
        self._provider = TracerProvider(resource=Resource.create({SERVICE_NAME: "tokenlake"}), shutdown_on_exit=False)
        self._provider.add_span_processor(processor)
        self._tracer = self._provider.get_tracer("tokenlake")

    @contextmanager
    def request(self, headers: Headers) -> Generator[RequestSpan]:
        """The span of a request."""
        carrier = {name.decode("latin-1"): value.decode("latin-1") for name, value in headers if name == b"traceparent"}
        with self._open("request", SpanKind.SERVER, _W3C.extract(carrier)) as span:
            yield _Request(span)

    @contextmanager
    def span(self, name: str, **more: Noted) -> Generator[None]:
        """A step of what is being handled, with the ids noted by its end."""
        with self._open(name) as span:
            try:
                yield
            finally:
                span.set_attributes(_attributes({**noted(), **more}))

    def close(self) -> None:
        """Send what is left; blocks until it is sent or given up."""
        self._provider.shutdown()

    @contextmanager
    def _open(self, name: str, kind: SpanKind = SpanKind.INTERNAL, parent: Context | None = None) -> Generator[Span]:
        """A span that says which error ended it, and not what the error says: that may hold what an agent wrote."""
        with self._tracer.start_as_current_span(
            name, parent, kind, record_exception=False, set_status_on_exception=False
        ) as span:
            try:
                yield span
            except BaseException as error:
                span.set_status(StatusCode.ERROR)
                span.set_attribute("error.type", type(error).__name__)
                raise


class _Request:
    def __init__(self, span: Span) -> None:
        self._span = span

    def end(self, name: str, notes: Mapping[str, Noted]) -> None:
        """Name the span, and say all that was noted."""
        self._span.update_name(name)
        self._span.set_attributes(_attributes(notes))


def _attributes(notes: Mapping[str, Noted]) -> dict[str, str | int | float]:
    return {_PREFIX + name: value for name, value in notes.items() if value is not None}
