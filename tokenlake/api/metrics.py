"""Counters of one service, in Prometheus form.

Each service has a registry of its own, so that two in one process (as in tests) do not add up.
"""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from tokenlake.store.compact import Compaction

__all__ = ["Metrics"]


class Metrics:
    """The metrics of `docs/http.md`."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.calls = Counter("gate_calls", "Committed calls.", ["mode", "dialect"], registry=self.registry)
        self.roots = Counter("gate_roots", "Calls without a parent, by cause.", ["cause"], registry=self.registry)
        self.token_in_rate = Gauge("gate_token_in_rate", "Continued calls by all committed.", registry=self.registry)
        self.capture_failures = Counter(
            "gate_capture_failures", "Calls that were not captured.", ["reason"], registry=self.registry
        )
        self.overhead = Histogram(
            "gate_call_overhead_seconds",
            "Time of a call outside the engine.",
            buckets=(0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.25, 1, 5),
            registry=self.registry,
        )
        self.http = Counter(
            "http_bytes",
            "Bytes of HTTP bodies by the side that is talked to; in is what the service received.",
            ["peer", "direction"],
            registry=self.registry,
        )
        self.open_rollouts = Gauge("gate_open_rollouts", "Rollouts that may still be called.", registry=self.registry)
        self.lineage_bytes = Gauge(
            "gate_lineage_bytes",
            "Size of the lineage segments, with the zeros they are written ahead by.",
            registry=self.registry,
        )
        self.stage = Histogram("stage_seconds", "Building and syncing one delta.", registry=self.registry)
        self.stage_bytes = Counter("stage_bytes", "Bytes of staged deltas.", registry=self.registry)
        self.rows = Counter("finalize_rows", "Published rows.", ["valid", "reason"], registry=self.registry)
        self.finalize_failures = Counter(
            "finalize_failures", "Runs of publishing that failed, by error.", ["error"], registry=self.registry
        )
        self.finalize = Histogram("finalize_seconds", "One run of publishing.", registry=self.registry)
        self.delivered = Gauge(
            "finalize_delivered_fraction", "Valid rows by all, of the last published group.", registry=self.registry
        )
        self.spread = Gauge(
            "group_wv_spread", "Newest minus oldest weight version of the last published group.", registry=self.registry
        )
        self.digest_failures = Counter(
            "digest_failures", "Records whose bytes are not what their digest says.", registry=self.registry
        )
        self.expired = Counter("rollouts_expired", "Attempts that nobody ended in time.", registry=self.registry)
        self.evictions = Gauge("gate_prefix_evictions", "Prefixes dropped from memory.", registry=self.registry)
        self.start = Gauge("gate_start_seconds", "From the start of the service to ready.", registry=self.registry)
        self.upkeep = Histogram("upkeep_seconds", "One run of compaction and retention.", registry=self.registry)
        self.upkeep_failures = Counter(
            "upkeep_failures", "Runs of upkeep that failed, by error.", ["error"], registry=self.registry
        )
        self.compacted = Counter("upkeep_compacted_records", "Deltas written anew.", registry=self.registry)
        self.freed = Counter("upkeep_freed_bytes", "Bytes that upkeep gave back.", registry=self.registry)
        self.retired = Counter("upkeep_retired_groups", "Groups whose deltas went.", registry=self.registry)
        self._token_in = 0
        self._committed = 0

    def committed(self, mode: str, dialect: str, cause: str | None) -> None:
        """Count one committed call; `cause` is why it is a root."""
        self.calls.labels(mode, dialect).inc()
        self._committed += 1
        self._token_in += mode == "token_in"
        if cause is not None:
            self.roots.labels(cause).inc()
        self.token_in_rate.set(self._token_in / self._committed)

    def upkept(self, done: Compaction, retired: int, seconds: float) -> None:
        """Count one run of upkeep; from any thread."""
        self.upkeep.observe(seconds)
        self.compacted.inc(done.records)
        self.freed.inc(max(0, done.bytes_before - done.bytes_after))
        self.retired.inc(retired)

    def text(self) -> bytes:
        """The exposition format."""
        return generate_latest(self.registry)
