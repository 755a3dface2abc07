"""The torch loader: ready rows as batches of whole groups, each group once, in a pinned order.

Source of the contract: `IterableDataset` of torch (worker processes share the groups through `get_worker_info`), and
distributed ranks, which share them before the workers do. A group's share follows from its place in the order of
publication, which only grows: shares do not move while groups are being published. The source is opened where
iteration happens, so a loader can be pickled, spawned and forked.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections import deque
from collections.abc import Generator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from pyarrow import fs

from tokenlake.errors import ConfigError, MissingExtra
from tokenlake.finalize.sources import ServiceSource, Source, placed_source
from tokenlake.finalize.tensors import Batch, packed, padded

try:
    from torch.utils.data import IterableDataset, get_worker_info
except ImportError as error:
    raise MissingExtra("the loader needs torch: pip install 'tokenlake[torch]'") from error

__all__ = ["Batch", "RowLoader"]


class RowLoader(IterableDataset[Batch]):
    """Iterates over ready rows in whole groups; iterating again goes on with what was published since.

    `source`: a lake's folder; the URL of a service, which needs its `token`; or where `tokenlake export` put rows: the
    URI of an object store, or a path of `filesystem`. `groups_per_batch`: groups in a batch.
    `pad_id`: what fills the rest of a sequence; None takes the registered model's, else 0. `seed`: shuffles the groups;
    None keeps the order of publication. `purpose`: `train`, `eval`, or None for both. `groups`: these and no others, in
    this order (what a claim gave), shared out by their place in it. `rank`, `world_size`: this process's share.
    `drop_last`: leave out a last batch of fewer groups; they come in a later pass, with what is published by then.
    `pack_tokens`: pack valid rows into sequences of this many tokens. `token_versions`: fill `weight_versions`.
    `prefetch`: batches made ahead by a thread. Raises `ConfigError` for what does not fit together.

    `state_dict()` and `load_state_dict()` continue after the groups already handed out by this object. With worker
    processes the training process counts by calling `advance` for each batch it has used.
    """

    def __init__(
        self,
        source: str | os.PathLike[str],
        *,
        token: str | None = None,
        filesystem: fs.FileSystem | None = None,
        groups_per_batch: int = 1,
        pad_id: int | None = None,
        seed: int | None = None,
        purpose: str | None = "train",
        groups: Sequence[str] | None = None,
        rank: int = 0,
        world_size: int = 1,
        drop_last: bool = False,
        pack_tokens: int | None = None,
        token_versions: bool = False,
        prefetch: int = 0,
    ) -> None:
        for name, value in (("groups_per_batch", groups_per_batch), ("pack_tokens", pack_tokens)):
            if value is not None and value < 1:
                raise ConfigError(f"{name} must be at least 1")
        if not 0 <= rank < world_size:
            raise ConfigError(f"rank {rank} is outside world_size {world_size}")
        if isinstance(groups, str):
            raise ConfigError(f"groups is a list of group ids: give [{groups!r}]")
        if groups is not None and seed is not None:
            raise ConfigError("groups have an order of their own: give no seed")
        self._url = source if isinstance(source, str) and source.startswith(("http://", "https://")) else None
        if self._url is not None and token is None:
            raise ConfigError("a service needs its control token: give token=...")
        self._source = source
        self._token = token
        self._filesystem = filesystem
        self._groups_per_batch = groups_per_batch
        self._pad_id = pad_id
        self._seed = seed
        self._purpose = purpose
        self._groups = None if groups is None else list(groups)
        self._rank = rank
        self._world_size = world_size
        self._drop_last = drop_last
        self._pack_tokens = pack_tokens
        self._token_versions = token_versions
        self._prefetch = prefetch
        self._done: list[str] = []

    def state_dict(self) -> dict[str, Any]:
        """Which groups were handed out, and the order they came in; JSON-able."""
        return {"seed": self._seed, "done": list(self._done)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on after `state`; its seed must be this loader's, or the order would change."""
        if not {"seed", "done"} <= state.keys():
            raise ConfigError("this is no state of a loader: give what `state_dict` returned")
        if state["seed"] != self._seed:
            raise ConfigError("the saved state has another seed than this loader")
        self._done = list(state["done"])

    def advance(self, batch: Batch) -> None:
        """Count a batch as handed out."""
        self._done += batch["group_ids"]

    def __iter__(self) -> Iterator[Batch]:
        worker = get_worker_info()
        number, workers = (0, 1) if worker is None else (worker.id, worker.num_workers)
        batches = self._batches(number, workers)
        for batch in _ahead(batches, self._prefetch) if self._prefetch > 0 else batches:
            if worker is None:
                self.advance(batch)
            yield batch

    def _batches(self, worker: int, workers: int) -> Generator[Batch]:
        with contextlib.closing(self._opened()) as source:
            pad_id = source.pad_id() if self._pad_id is None else self._pad_id
            order = source.groups(self._purpose) if self._groups is None else self._groups
            share, shares = self._rank + worker * self._world_size, self._world_size * workers
            done = set(self._done)
            mine = [group for group in order[share::shares] if group not in done]
            if self._seed is not None:
                mine.sort(key=self._shuffled)
            for start in range(0, len(mine), self._groups_per_batch):
                names = mine[start : start + self._groups_per_batch]
                if self._drop_last and len(names) < self._groups_per_batch:
                    return
                table = source.rows(names)
                runs = source.versions(names) if self._token_versions else ()
                if self._pack_tokens is None:
                    yield padded(table, names, pad_id, runs)
                else:
                    yield packed(table, names, pad_id, self._pack_tokens, runs)

    def _opened(self) -> Source:
        if self._url is not None:
            return ServiceSource(self._url, self._token or "")
        return placed_source(self._source, self._filesystem)

    def _shuffled(self, group_id: str) -> bytes:
        """A key that puts groups in an order of the seed, which a group published later does not change."""
        return hashlib.sha256(f"{self._seed}:{group_id}".encode()).digest()


def _ahead(batches: Generator[Batch], depth: int) -> Iterator[Batch]:
    """The same batches, made by a thread up to `depth` ahead; what goes wrong there is raised here."""
    with contextlib.closing(batches), ThreadPoolExecutor(1, thread_name_prefix="tokenlake-prefetch") as pool:
        waiting = deque(pool.submit(next, batches, None) for _ in range(depth))
        try:
            while (batch := waiting.popleft().result()) is not None:
                waiting.append(pool.submit(next, batches, None))
                yield batch
        finally:
            for each in waiting:
                each.cancel()
