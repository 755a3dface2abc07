"""An engine that is somebody else's server: an unmodified vLLM behind HTTP, captured at the gate.

Needs the `serve` extra; without it the import fails with `tokenlake.errors.MissingExtra`.
"""

from tokenlake.ingest.upstream._extra import EXTRA
from tokenlake.ingest.upstream.client import UpstreamClient, checked_url
from tokenlake.ingest.upstream.engine import UpstreamEngine
from tokenlake.ingest.upstream.facts import UpstreamFacts
from tokenlake.ingest.upstream.hop import Hop
from tokenlake.ingest.upstream.probe import probe

__all__ = ["EXTRA", "Hop", "UpstreamClient", "UpstreamEngine", "UpstreamFacts", "checked_url", "probe"]
