"""What time it is: one clock for deadlines, leases, times to live, ids and the times of events.

The wall clock as it was when this process began, and from there on the monotonic one: deadlines of a running service
neither come early nor stay away because somebody set the clock. A restart takes the wall clock as it then is.
"""

from __future__ import annotations

import time

__all__ = ["now_us"]

_BEGAN_NS = time.time_ns() - time.monotonic_ns()


def now_us() -> int:
    """Microseconds since the epoch."""
    return (_BEGAN_NS + time.monotonic_ns()) // 1000
