"""Lakes that were checked already: most kills leave one that, once it is opened, another kill left as well.

What an opened lake does next depends on its files, on what its index holds, and on nothing else: so two that are equal
in both are one, and are worked on, compacted and audited once for the same acknowledgements.
"""

from __future__ import annotations

from hashlib import sha256
from pathlib import Path

from tests.crash.scenario import Told
from tests.crash.shim import read_tree
from tests.crash.states import digest
from tokenlake.store.lake import OwnedLake

_TABLES = ("tl_events", "tl_places", "tl_rows", "tl_damage", "tl_anchors")


class Known:
    """Shared by the processes of a run through a folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def first(self, lake: OwnedLake, told: Told) -> bool:
        """Whether nobody has checked this lake for what was told."""
        tree = read_tree(lake.path)
        parts = [digest(tree, index=False), *(name for name in tree if name.startswith("index."))]
        con = lake.connect(query="")
        for table in _TABLES:
            parts += map(repr, con.table(table).order("ALL").fetchall())
        for kind, writer, segment, scanned, ended, inode in con.table("tl_segments").order("ALL").fetchall():
            path = lake.path / kind / writer / f"{segment:06d}.arrow"
            now = path.stat().st_ino if path.exists() else None
            parts.append(repr((kind, writer, segment, scanned, ended, inode == now)))
        con.close()
        parts += sorted(repr(each) for each in told if each[0] not in ("refused", "closed"))
        try:
            (self._folder / sha256("\n".join(parts).encode()).hexdigest()).mkdir()
        except FileExistsError:
            return False
        return True
