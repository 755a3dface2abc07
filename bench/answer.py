"""What a peer's module does in its own process: one work, and one JSON line that `bench.peers` reads.

`python -m MODULE WORK SEED SPEC... FOLDER`; the line has, by what is measured, a sample in the unit of its row.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from bench.measure import Sample

__all__ = ["Found", "answer"]

Found = dict[str, Sample]
"""By what is measured."""


def answer(*works: Callable[[int, Sequence[int], Path], Found]) -> None:
    """Do the work that the command line names, with its seed, how much there is to do, and a folder; print the line."""
    name, seed, *spec, folder = sys.argv[1:]
    named: Mapping[str, Callable[[int, Sequence[int], Path], Found]] = {work.__name__: work for work in works}
    found = named[name](int(seed), [*map(int, spec)], Path(folder))
    print(json.dumps({measure: asdict(sample) for measure, sample in found.items()}))
