"""Token-exact capture of agent rollouts, as verified training rows that one can query.

`open` a lake to read it, from any number of processes, beside a running service. Everything heavier (the gate, the
engines, the loader) is in its own module and needs its extra.
"""

from tokenlake.errors import TokenlakeError
from tokenlake.store.reader import Lake, open  # noqa: A004  # `tokenlake.open(path)` is the documented door

__all__ = ["Lake", "TokenlakeError", "open"]
