"""The curves of one or more runs as a PNG: reward, KL, valid rows and staleness by step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenlake.errors import MissingExtra

try:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
except ImportError as error:
    raise MissingExtra("curves need matplotlib: pip install 'tokenlake[demo]'") from error

__all__ = ["draw"]

_PANELS = (
    ("reward", "share solved", "linear"),
    ("kl", "k3, trainer and sampler", "log"),
    ("kl_same", "k3 under a row's own version", "log"),
    ("valid_rows", "valid rows", "linear"),
    ("staleness", "versions behind, mean", "linear"),
    ("differ_share", "rows whose ids differ", "linear"),
)


def draw(path: Path, runs: Mapping[str, Sequence[Mapping[str, Any]]]) -> None:
    """Draw the per-step logs of runs by name; a value that a log lacks leaves a gap."""
    figure = Figure(figsize=(12, 6.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes: Any = figure.subplots(2, 3).flat
    for axis, (name, title, scale) in zip(axes, _PANELS, strict=True):
        for run, steps in runs.items():
            values = [step.get(name) for step in steps]
            style = "--" if run.startswith("text") else "-"
            axis.plot([float("nan") if value is None else value for value in values], style, label=run)
        axis.set_title(title)
        axis.set_xlabel("step")
        axis.set_yscale(scale)
    axes[0].legend()
    figure.savefig(path, dpi=110)  # pyright: ignore[reportUnknownMemberType]  # untyped in matplotlib
