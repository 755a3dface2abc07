"""Colour for a terminal that wants it, and plain text for everything else."""

from __future__ import annotations

import re
from collections.abc import Sequence
from shutil import get_terminal_size
from typing import TextIO

from tokenlake.api.settings import no_colour

__all__ = ["Paint"]

_CODES = {"bold": "1", "dim": "2", "red": "31", "green": "32", "yellow": "33", "cyan": "36"}
_ESCAPE = re.compile(r"\x1b\[[0-9;]*m")


class Paint:
    """Paints text that goes to `stream`: only on a terminal, and not where `NO_COLOR` is set (no-color.org)."""

    def __init__(self, stream: TextIO) -> None:
        self.on = stream.isatty() and not no_colour()

    def __call__(self, text: str, *styles: str) -> str:
        """The text in some of the styles bold, dim, red, green, yellow and cyan."""
        codes = ";".join(_CODES[style] for style in styles)
        return f"\x1b[{codes}m{text}\x1b[0m" if self.on and codes else text

    def wrapped(self, words: Sequence[str], indent: int) -> str:
        """The words on one line, or on a terminal below it on lines that fit, so that none is torn."""
        if not self.on:
            return " ".join(words)
        width = get_terminal_size().columns
        lines: list[str] = []
        room = 0
        for word in words:
            size = len(_ESCAPE.sub("", word)) + 1
            if size > room:
                lines.append(" " * indent + word)
                room = width - indent - size
            else:
                lines[-1] += " " + word
                room -= size
        return "\n".join(["", *lines])

    def shade(self, text: str, level: int, levels: int) -> str:
        """The text on a background from red (level 0) over yellow to green (the last of `levels`)."""
        if not self.on:
            return text
        # Colours 16 to 231 of a terminal are a cube of 6 x 6 x 6: 36 a step of red, 6 a step of green.
        step = round(10 * level / max(levels - 1, 1))
        return f"\x1b[30;48;5;{16 + 36 * min(5, 10 - step) + 6 * min(5, step)}m{text}\x1b[0m"
