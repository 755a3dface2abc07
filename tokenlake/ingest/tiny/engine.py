"""The embedded engine: the tiny model behind the engine contract.

It serves the demo and the tests as a real policy would: many requests at once, exact ids and log-probabilities, weights
that change under running requests. Torch runs in the scheduler's thread and never on the event loop.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from tokenlake.errors import ContextOverflow, EngineFailed
from tokenlake.ingest.engine import AssistantTurn, Generation, LogprobMode, Message, SamplingParams, Tool, TurnDelta
from tokenlake.ingest.tiny.model import TinyModel, load_model
from tokenlake.ingest.tiny.requests import Request
from tokenlake.ingest.tiny.sampling import check_params
from tokenlake.ingest.tiny.scheduler import Scheduler
from tokenlake.ingest.tiny.template import ChatTemplate
from tokenlake.ingest.tiny.tokenizer import TinyTokenizer
from tokenlake.ingest.toolcalls import parse_turn

__all__ = ["WEIGHTS_DIR", "TinyEngine"]

WEIGHTS_DIR = Path(__file__).with_name("weights")
"""The shipped model: `model.safetensors`, `tokenizer.json`, `config.json`."""


class TinyEngine:
    """An `Engine` over a directory of weights; one instance, any number of concurrent requests.

    `seed` drives the requests that bring no seed of their own, in the order of their `generate` calls. `trace_path` is
    a JSONL file to which the engine appends what it sampled, one line a finished request: `request_id`,
    `prompt_token_ids`, `token_ids`, `logprobs`, `versions` (of the weights, one a token). `max_batch` requests run at
    once; others wait. `threads` is torch's thread count for the engine's own thread (None leaves it as it is): steps
    this small lose more by waiting for a second thread than they gain, by far where cores are shared.
    """

    logprob_mode: LogprobMode = "processed"

    def __init__(
        self,
        weights_dir: Path | str | None = None,
        seed: int = 0,
        trace_path: Path | str | None = None,
        max_batch: int = 32,
        threads: int | None = 1,
    ) -> None:
        if max_batch < 1:
            raise ValueError(f"max_batch must be 1 or more, got {max_batch}")
        directory = Path(weights_dir) if weights_dir is not None else WEIGHTS_DIR
        self.model: TinyModel = load_model(directory)
        """The loaded network; its weights are replaced in place by `set_weights`."""
        self._tokenizer = TinyTokenizer(directory / "tokenizer.json")
        self._template = ChatTemplate()
        weights = hashlib.sha256((directory / "model.safetensors").read_bytes()).hexdigest()
        self._digests = {"tokenizer": self._tokenizer.digest, "template": self._template.digest, "model": weights}
        self._seed, self._submitted = seed, 0
        self._active: set[str] = set()
        trace = Path(trace_path) if trace_path is not None else None
        self._scheduler = Scheduler(self.model, self._tokenizer, max_batch, threads, trace)

    @property
    def name(self) -> str:
        """The model's name in `config.json`."""
        return self.model.config.name

    @property
    def stop_ids(self) -> tuple[int, ...]:
        """End of turn, then end of text."""
        return self._tokenizer.stop_ids

    @property
    def max_model_len(self) -> int:
        """Tokens of prompt and answer together."""
        return self.model.config.max_model_len

    @property
    def vocab_size(self) -> int:
        """Every id is below this."""
        return self.model.config.vocab_size

    @property
    def pad_id(self) -> int:
        """End of text; no prompt contains it unless somebody wrote it."""
        return self._tokenizer.pad_id

    @property
    def weight_version(self) -> int | None:
        """What `set_weights` loaded last; None before the first time."""
        return self._scheduler.version

    @property
    def running(self) -> bool:
        """Whether the scheduler's thread takes requests."""
        return self._scheduler.running

    async def start(self) -> None:
        """Start the scheduler's thread; idempotent, and again after `stop`."""
        self._scheduler.start()

    async def stop(self) -> None:
        """Abort what runs, each with what it has sampled, and end the thread; idempotent."""
        await asyncio.to_thread(self._scheduler.stop)

    async def generate(
        self,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        *,
        request_id: str,
        on_delta: Callable[[TurnDelta], None] | None = None,
    ) -> Generation:
        """Sample one continuation of these ids; cancelling the task aborts the request.

        Temperature 0 is greedy, with the log-probabilities of the distribution at temperature 1. The same seed,
        prompt and weights give the same tokens, up to float rounding between batches of different sizes.

        Raises:
            ContextOverflow: `len(prompt) + 1` is more than the context; nothing ran.
            ValueError: no prompt, an id outside the vocabulary, a parameter out of range, a `request_id` in use.
            EngineFailed: the engine is not running, or broke under this request.
        """
        prompt = [int(token) for token in prompt_token_ids]
        self._check(prompt, params, request_id)
        room = self.max_model_len - len(prompt)
        loop = asyncio.get_running_loop()
        request = Request(
            request_id=request_id,
            prompt=prompt,
            params=params,
            limit=room if params.max_tokens is None else min(room, params.max_tokens),
            generator=self._generator(params.seed),
            loop=loop,
            future=loop.create_future(),
            on_delta=on_delta,
        )
        if not self._scheduler.submit(request):
            raise EngineFailed("the tiny engine is not running: await its start() first", reason="engine_stopped")
        self._active.add(request_id)
        try:
            return await request.future
        except asyncio.CancelledError:
            self._scheduler.abort(request_id)
            raise
        finally:
            self._active.discard(request_id)

    def _check(self, prompt: list[int], params: SamplingParams, request_id: str) -> None:
        check_params(params)
        if not prompt:
            raise ValueError("the prompt has no tokens")
        if len(prompt) + 1 > self.max_model_len:
            raise ContextOverflow(
                f"the prompt has {len(prompt)} tokens and the model holds {self.max_model_len} with the answer: "
                "shorten the conversation",
                prompt_len=len(prompt),
                max_model_len=self.max_model_len,
            )
        if min(prompt) < 0 or max(prompt) >= self.vocab_size:
            raise ValueError(f"a prompt id is outside the vocabulary of {self.vocab_size}")
        if request_id in self._active:
            raise ValueError(f"request {request_id!r} is running already")

    def _generator(self, seed: int | None) -> torch.Generator:
        if seed is None:
            material = f"{self._seed}:{self._submitted}".encode()
            seed = int.from_bytes(hashlib.sha256(material).digest()[:7], "little")
            self._submitted += 1
        return torch.Generator().manual_seed(seed)

    async def abort(self, request_id: str) -> None:
        """End a request with finish reason `abort` and what it has sampled; an unknown or finished one is no error."""
        self._scheduler.abort(request_id)

    def render_text(
        self, messages: Sequence[Message], tools: Sequence[Tool] | None, *, add_generation_prompt: bool
    ) -> str:
        """The chat template's text; ValueError for a message that it cannot express."""
        return self._template.render(messages, tools, add_generation_prompt=add_generation_prompt)

    def render(
        self, messages: Sequence[Message], tools: Sequence[Tool] | None, *, add_generation_prompt: bool
    ) -> list[int]:
        """The ids of `render_text`."""
        return self.encode(self.render_text(messages, tools, add_generation_prompt=add_generation_prompt))

    def encode(self, text: str) -> list[int]:
        """Ids of a text, nothing added; ValueError for a lone surrogate."""
        return self._tokenizer.encode(text)

    def decode(self, ids: Sequence[int], *, skip_special: bool = False) -> str:
        """Text of these ids; `skip_special` leaves out turn and text ends, not the markers of thinking and tools."""
        return self._tokenizer.decode(ids, skip_special=skip_special)

    def parse(self, token_ids: Sequence[int], text: str, *, calls: bool = True) -> AssistantTurn:  # noqa: ARG002 - the contract offers both
        """A generation as an assistant turn; the text says it all here, whatever the ids."""
        return parse_turn(text, calls=calls)

    def digests(self) -> dict[str, str]:
        """SHA-256 hex of `tokenizer.json`, of the template file, and of the `model.safetensors` started with."""
        return dict(self._digests)

    async def set_weights(self, state: Mapping[str, Tensor] | None, version: int) -> None:
        """Replace the weights between two decode steps; running requests go on, over the keys and values they have.

        `state` has the names and shapes of `model.state_dict()`, in any float type; it is copied, and must not change
        before this returns. None keeps the weights and relabels them. The loaded version again is allowed.

        Raises:
            ValueError: a negative version or one older than the loaded, or tensors that do not fit; nothing is changed.
            EngineFailed: loading broke; the version is the older one.
        """
        if version < 0:
            raise ValueError(f"a weight version is 0 or more, got {version}")
        if state is not None:
            self.model.check(state)
        loop = asyncio.get_running_loop()
        done: asyncio.Future[Exception | None] = loop.create_future()

        def tell(refused: Exception | None) -> None:
            loop.call_soon_threadsafe(lambda: None if done.done() else done.set_result(refused))

        running = self._scheduler.load(state, version, tell)
        refused = await done if running else self._scheduler.apply(state, version)
        if refused is not None:
            raise refused
