"""The Grafana dashboard asks for metrics that exist, and leaves none of them out."""

from __future__ import annotations

import json
import re
from pathlib import Path

from tokenlake.api.metrics import Metrics

DASHBOARD = json.loads((Path(__file__).resolve().parents[2] / "docs" / "grafana.json").read_text())
EXPRESSIONS = [target["expr"] for panel in DASHBOARD["panels"] for target in panel["targets"]]
WORDS = {
    "sum",
    "by",
    "rate",
    "increase",
    "histogram_quantile",
    "le",
    "mode",
    "dialect",
    "cause",
    "reason",
    "valid",
    "error",
    "peer",
    "direction",
}


def asked() -> set[str]:
    names = {
        name for text in EXPRESSIONS for name in re.findall(r"(?<![$\w])[a-z_]{2,}", re.sub(r"\[[^]]*\]", "", text))
    }
    return names - WORDS


def offered() -> dict[str, set[str]]:
    """Each metric's names on the wire."""
    suffixes = {"counter": ["_total"], "gauge": [""], "histogram": ["_bucket", "_sum", "_count"]}
    return {
        family.name: {family.name + suffix for suffix in suffixes[family.type]}
        for family in Metrics().registry.collect()
    }


def test_every_metric_that_the_dashboard_names_exists() -> None:
    assert asked() - set().union(*offered().values()) == set()


def test_the_dashboard_shows_every_metric() -> None:
    assert [name for name, wire in offered().items() if not wire & asked()] == []


def test_every_panel_says_what_it_shows() -> None:
    assert [panel["id"] for panel in DASHBOARD["panels"] if not (panel["title"] and panel["description"])] == []
