"""Colour for a terminal that wants it, and plain text for everything else."""

from __future__ import annotations

from typing import TextIO

from tokenlake.api.settings import no_colour

__all__ = ["Paint"]

_CODES = {"bold": "1", "dim": "2", "red": "31", "green": "32", "yellow": "33", "cyan": "36"}


class Paint:
    """Paints text that goes to `stream`: only on a terminal, and not where `NO_COLOR` is set (no-color.org)."""

    def __init__(self, stream: TextIO) -> None:
        self.on = stream.isatty() and not no_colour()

    def __call__(self, text: str, *styles: str) -> str:
        """The text in some of the styles bold, dim, red, green, yellow and cyan."""
        codes = ";".join(_CODES[style] for style in styles)
        return f"\x1b[{codes}m{text}\x1b[0m" if self.on and codes else text

    def shade(self, text: str, level: int, levels: int) -> str:
        """The text on a background from red (level 0) over yellow to green (the last of `levels`)."""
        if not self.on:
            return text
        # Colours 16 to 231 of a terminal are a cube of 6 x 6 x 6: 36 a step of red, 6 a step of green.
        step = round(10 * level / max(levels - 1, 1))
        return f"\x1b[30;48;5;{16 + 36 * min(5, 10 - step) + 6 * min(5, step)}m{text}\x1b[0m"
