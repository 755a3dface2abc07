"""A process that ends with the one that started it, however that ended."""

from __future__ import annotations

import os
import signal
import sys
import threading

__all__ = ["end_with_parent"]


def end_with_parent() -> None:
    """From now on, the end of standard input ends this process as SIGTERM does.

    The one that started it holds the other end of the pipe; when it dies, even killed, the pipe closes.
    """

    def watch() -> None:
        while os.read(0, 4096):
            pass
        os.kill(os.getpid(), signal.SIGTERM)

    if sys.stdin is not None:
        threading.Thread(target=watch, name="tokenlake-parent", daemon=True).start()
