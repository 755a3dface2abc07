"""A service's own figures for a trainer's log: `gate/*`, one number a metric and label."""

from __future__ import annotations

import logging

import httpx
from prometheus_client.parser import text_string_to_metric_families

__all__ = ["gate_metrics"]

_log = logging.getLogger(__name__)


async def gate_metrics(url: str, token: str, *, deadline_s: float = 5.0) -> dict[str, float]:
    """The gate's counters and gauges now; nothing, and a line in the log, when they cannot be had."""
    try:
        async with httpx.AsyncClient(timeout=deadline_s) as http:
            answer = await http.get(f"{url}/metrics", headers={"Authorization": f"Bearer {token}"})
            answer.raise_for_status()
        families = list(text_string_to_metric_families(answer.text))
    except (httpx.HTTPError, ValueError) as error:
        _log.warning("metrics of %s could not be read, training goes on: %s", url, error)
        return {}
    found: dict[str, float] = {}
    for family in families:
        for sample in family.samples:
            if family.name.startswith("gate_") and not sample.name.endswith(("_bucket", "_created")):
                labels = ",".join(sample.labels[name] for name in sorted(sample.labels) if sample.labels[name])
                found[f"gate/{sample.name.removeprefix('gate_')}{'.' + labels if labels else ''}"] = sample.value
    return found
