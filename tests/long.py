"""How much of a test that could go on for ever is run: little each time, all of it by `make crash`."""

from __future__ import annotations

import os

import pytest

__all__ = ["LONG", "ONLY_LONG", "either"]

LONG = "TOKENLAKE_TEST_LONG" in os.environ
ONLY_LONG = pytest.mark.skipif(not LONG, reason="TOKENLAKE_TEST_LONG is not set")


def either(short: int, long: int) -> int:
    """The size of a test, short or long."""
    return long if LONG else short
