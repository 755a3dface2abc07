"""Continuous batching: one thread that runs the model for every request at once.

Commands (a new request, an abort, new weights) arrive in a queue and are taken between two decode steps, in order. A
new request is prefilled alone and gets its first token at once; then each step decodes one token for every running
request in one forward. Running requests hold the first slots of the key-value cache, so that a batch is a slice of
it. New weights keep the caches: a request goes on over keys and values of the older weights, and its spans say which
version sampled what.

What breaks fails the requests that it was done for, and nobody else: the thread goes on.
"""

# The stubs of torch leave `tolist` unknown.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import json
import logging
from collections import deque
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from queue import SimpleQueue
from threading import Lock, Thread

import torch
from torch import Tensor

from tokenlake.errors import EngineFailed
from tokenlake.ingest.tiny.model import KVCache, TinyModel
from tokenlake.ingest.tiny.requests import Request
from tokenlake.ingest.tiny.sampling import draw, processed_logprobs
from tokenlake.ingest.tiny.tokenizer import TinyTokenizer

__all__ = ["Scheduler"]

_log = logging.getLogger(__name__)


class Scheduler:
    """Runs in a thread of its own from `start` to `stop`; every other method may be called from any thread."""

    def __init__(
        self,
        model: TinyModel,
        tokenizer: TinyTokenizer,
        max_batch: int,
        threads: int | None,
        trace_path: Path | None,
    ) -> None:
        self._model = model
        self._tokenizer = tokenizer
        self._max_batch = max_batch
        self._threads = threads
        self._trace_path = trace_path
        self._cache = KVCache(model.config, max_batch)
        self._commands: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._waiting: deque[Request] = deque()
        self._running: list[Request] = []
        self._lock = Lock()
        self._open = False
        self._stopping = False
        self._thread: Thread | None = None
        self.version: int | None = None
        """Version of the loaded weights; written by the thread alone, or while it is not running."""

    @property
    def running(self) -> bool:
        """Whether requests are taken."""
        return self._open

    def start(self) -> None:
        """Start the thread; nothing happens while it runs."""
        with self._lock:
            if self._open:
                return
            self._open, self._stopping = True, False
            self._thread = Thread(target=self._serve, name="tokenlake-tiny", daemon=True)
            self._thread.start()

    def stop(self) -> None:
        """Abort what runs and wait for the thread to end; nothing happens while there is none."""
        self._put(self._stop)
        if self._thread is not None:
            self._thread.join()

    def submit(self, request: Request) -> bool:
        """Queue a request, whose future gets the generation; False when the thread is not running."""
        return self._put(lambda: self._waiting.append(request))

    def abort(self, request_id: str) -> bool:
        """End a request, if it is there, with what it has; False when the thread is not running."""
        return self._put(lambda: self._abort(request_id))

    def load(self, state: Mapping[str, Tensor] | None, version: int, done: Callable[[Exception | None], None]) -> bool:
        """Between two steps, `apply` and hand what it returns to `done`; False when the thread is not running."""

        def take() -> None:
            try:
                refused = self.apply(state, version)
            except Exception as error:  # noqa: BLE001 - the border of a command: who gave it is told
                refused = _broken(error)
            done(refused)

        return self._put(take)

    def apply(self, state: Mapping[str, Tensor] | None, version: int) -> Exception | None:
        """Replace weights here and now; only for the thread itself, or while there is none."""
        if self.version is not None and version < self.version:
            return ValueError(f"weight version {version} is older than the loaded {self.version}")
        if state is not None:
            self._model.load(state)
        self.version = version
        return None

    def _put(self, command: Callable[[], None]) -> bool:
        with self._lock:
            if self._open:
                self._commands.put(command)
            return self._open

    def _serve(self) -> None:
        if self._threads is not None:
            torch.set_num_threads(self._threads)
        try:
            with torch.no_grad():
                self._loop()
        except BaseException as error:  # the border of the thread: whatever ends it must reach those who wait
            self._close(_broken(error))
            raise
        self._close(None)

    def _close(self, failure: EngineFailed | None) -> None:
        """Take no more commands, run those that came, and end every request: with the failure, or with what it has."""
        with self._lock:
            self._open = False
            while not self._commands.empty():
                self._commands.get()()
        ended = [*self._running, *self._waiting]
        self._running.clear()
        self._waiting.clear()
        for request in ended:
            if failure is None:
                with self._for([request]):
                    self._deliver(request)
            else:
                request.reject(failure)

    def _loop(self) -> None:
        while not self._stopping:
            self._take_commands()
            while self._waiting and len(self._running) < self._max_batch and not self._stopping:
                self._admit(self._waiting.popleft())
            if self._running and not self._stopping:
                self._step()

    def _take_commands(self) -> None:
        """Run what is queued, in order, up to a request that can be admitted; wait if there is nothing else to do."""
        while not self._stopping and not (self._waiting and len(self._running) < self._max_batch):
            if self._commands.empty() and self._running:
                return
            self._commands.get()()

    def _admit(self, request: Request) -> None:
        self._running.append(request)
        with self._for([request]):
            logits = self._model.prefill(torch.tensor(request.prompt), self._cache, len(self._running) - 1)
            self._sample(logits[None], [request])

    def _step(self) -> None:
        batch = list(self._running)
        with self._for(batch):
            newest = torch.tensor([request.token_ids[-1] for request in batch])
            lengths = torch.tensor([_held(request) for request in batch])
            self._sample(self._model.decode(newest, lengths, self._cache), batch)

    @contextmanager
    def _for(self, requests: Sequence[Request]) -> Generator[None]:
        """The border of what is done for some requests: what breaks there ends them, and is a line in the log."""
        try:
            yield
        except Exception as error:  # noqa: BLE001 - nobody foresaw it, and other requests have no part in it
            _log.exception("the tiny engine broke under %d requests", len(requests))
            for request in requests:
                if request in self._running:
                    self._remove(request)
                request.reject(_broken(error))

    def _sample(self, logits: Tensor, batch: list[Request]) -> None:
        params = [request.params for request in batch]
        logprobs = processed_logprobs(logits, params)
        ids = draw(logprobs, params, [request.generator for request in batch])
        chosen = logprobs.gather(-1, torch.tensor(ids)[:, None])[:, 0].tolist()
        for request, token_id, logprob in zip(batch, ids, chosen, strict=True):
            with self._for([request]):
                request.append(token_id, logprob, self.version, self._tokenizer)
                if request.finish_reason is not None:
                    self._remove(request)
                    self._deliver(request)

    def _remove(self, request: Request) -> None:
        """Give its slot to the last running request."""
        slot, last = self._running.index(request), self._running.pop()
        if last is not request:
            self._cache.move(len(self._running), slot, _held(last) + 1)
            self._running[slot] = last

    def _abort(self, request_id: str) -> None:
        for request in [r for r in (*self._running, *self._waiting) if r.request_id == request_id]:
            with self._for([request]):
                if request in self._running:
                    self._remove(request)
                else:
                    self._waiting.remove(request)
                self._deliver(request)

    def _stop(self) -> None:
        self._stopping = True

    def _deliver(self, request: Request) -> None:
        generation = request.result(self._tokenizer)
        try:
            self._trace(request)
        except OSError as error:
            raise EngineFailed(f"the trace cannot be written: {error.strerror}") from error
        request.resolve(generation)

    def _trace(self, request: Request) -> None:
        if self._trace_path is None:
            return
        record = {
            "request_id": request.request_id,
            "prompt_token_ids": request.prompt,
            "token_ids": request.token_ids,
            "logprobs": request.logprobs,
            "versions": request.versions,
        }
        with self._trace_path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")


def _broken(error: BaseException) -> EngineFailed:
    """What callers and, through them, agents learn; what the error itself says is for the log."""
    if isinstance(error, EngineFailed):
        return error
    return EngineFailed(f"the tiny engine broke ({type(error).__name__}): its log says how")


def _held(request: Request) -> int:
    """Positions the cache holds of a request before its newest token is run."""
    return len(request.prompt) + len(request.token_ids) - 1
