"""The engine contract: what the capture core may ask of whatever samples tokens.

The capture core is engine-blind: it renders, splices and stages through this protocol, and every engine (the embedded
tiny model, vLLM) answers it. The module imports nothing heavy, so that the core and its tests need no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol, runtime_checkable

from tokenlake.errors import ContextOverflow, EngineFailed

if TYPE_CHECKING:
    import torch

__all__ = [
    "AssistantTurn",
    "ContextOverflow",
    "Engine",
    "EngineFailed",
    "FinishReason",
    "Generation",
    "LogprobMode",
    "Message",
    "SamplingParams",
    "Tool",
    "ToolCall",
    "TurnDelta",
]

FinishReason = Literal["stop", "length", "abort"]
LogprobMode = Literal["raw", "processed"]
Message = dict[str, Any]
"""One chat message as a template sees it: `role`, `content`, and by role `tool_calls`, `tool_call_id`, `name`."""
Tool = dict[str, Any]
"""One tool in OpenAI form: `{"type": "function", "function": {"name", "description", "parameters"}}`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How to sample one generation."""

    temperature: float = 1.0
    """Divides the logits; 0 is greedy, whose logprobs are those of the distribution at temperature 1."""
    top_p: float = 1.0
    """Nucleus mass in (0, 1]; 1 is off."""
    top_k: int = 0
    """Keep this many most likely tokens; 0 is off."""
    max_tokens: int | None = None
    """Sampled tokens at most, stop id included; None is whatever the context holds."""
    stop: tuple[str, ...] = ()
    """Texts that end the generation; the ids up to the completing one are kept, the text is cut before the match."""
    seed: int | None = None
    """Seeds a generator of this request's own; None draws from the engine's sequence."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """What the engine sampled, as it sampled it."""

    token_ids: list[int]
    """Sampled ids in order, a sampled stop id included."""
    logprobs: list[float]
    """Aligned with `token_ids`: float32 values, natural log, of the engine's `logprob_mode`."""
    finish_reason: FinishReason
    text: str
    """Decoded sampled text, without the stop id and without anything from a stop string on."""
    weight_version: int | None
    """Version of the weights that sampled the first token; None means unknown, never 0."""
    weight_version_end: int | None
    """Version at the last sampled token."""
    weight_version_spans: list[tuple[int, int, int]] | None
    """`(version, start, end)` over the sampled tokens, half-open, covering all of them; None when the engine
    cannot tell, or when the version of any of them is unknown."""
    stop_sequence: str | None = None
    """The text of `SamplingParams.stop` that ended it; None when something else did, or the engine does not tell."""
    fault: str | None = None
    """Why what the engine said of ids or log-probabilities contradicts itself: one of `CAPTURE_FAILURES`. The text may
    be served, the ids are never captured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCall:
    """One tool call that the model wrote."""

    id: str
    """Linkage only, minted by the parser; unique within the process's lifetime for practical purposes."""
    name: str
    arguments: str
    """The JSON text of the arguments exactly as sampled; never re-serialized."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AssistantTurn:
    """A generation read as an assistant message."""

    content: str | None
    """What the model said besides thinking and tool calls; None when it said nothing."""
    reasoning: str | None
    """The text inside the leading think block; None when there was none."""
    tool_calls: list[ToolCall]


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnDelta:
    """A piece of a turn that is certain before the turn has ended."""

    kind: Literal["content", "reasoning"]
    text: str


@runtime_checkable
class Engine(Protocol):
    """Renders conversations to token ids and samples from a policy; one instance serves many requests at once."""

    @property
    def name(self) -> str:
        """What the served model is called."""
        ...

    @property
    def logprob_mode(self) -> LogprobMode:
        """`processed`: after temperature, top_k and top_p; `raw`: of the plain softmax of the logits."""
        ...

    @property
    def stop_ids(self) -> tuple[int, ...]:
        """Ids any of which ends a generation."""
        ...

    @property
    def max_model_len(self) -> int:
        """Tokens of prompt and answer together, at most."""
        ...

    @property
    def vocab_size(self) -> int | None:
        """Every id is below this; None when the engine does not tell."""
        ...

    @property
    def pad_id(self) -> int:
        """The id that fills what no token fills."""
        ...

    @property
    def weight_version(self) -> int | None:
        """Version of the weights that the next token will be sampled with; None when nobody said."""
        ...

    @property
    def running(self) -> bool:
        """Whether it takes requests: started, not stopped, and not broken beyond them."""
        ...

    async def start(self) -> None:
        """Begin serving; idempotent."""
        ...

    async def stop(self) -> None:
        """Abort what runs and release the engine; idempotent."""
        ...

    async def generate(
        self,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        *,
        request_id: str,
        on_delta: Callable[[TurnDelta], None] | None = None,
    ) -> Generation:
        """Sample one continuation of exactly these ids.

        `on_delta` gets visible text as soon as it is certain, on the event loop, in order and before this returns: for
        each kind, what it got is a prefix of what `parse` says in the end. Bytes that are no whole character yet, what
        may be the beginning of a stop string, and whatever may still become a tool call or be stripped are held back.
        An engine that cannot tell never calls it.

        Raises:
            ContextOverflow: the prompt leaves no room for one token (`len(prompt) + 1 > max_model_len`); nothing ran.
            EngineFailed: the engine is not running, or broke while this request ran.
            ValueError: an empty prompt, an id outside the vocabulary, a parameter out of range, a `request_id` in use.
        """
        ...

    async def abort(self, request_id: str) -> None:
        """End a running request with finish reason `abort` and what it has sampled; an unknown id is no error."""
        ...

    def render(
        self, messages: Sequence[Message], tools: Sequence[Tool] | None, *, add_generation_prompt: bool
    ) -> list[int]:
        """The chat template's text of this conversation, as ids.

        Raises:
            ValueError: a message that the template cannot express.
        """
        ...

    def render_text(
        self, messages: Sequence[Message], tools: Sequence[Tool] | None, *, add_generation_prompt: bool
    ) -> str:
        """As `render`, before tokenization."""
        ...

    def encode(self, text: str) -> list[int]:
        """Ids of a text; special tokens written in it become their ids; nothing is added around it."""
        ...

    def decode(self, ids: Sequence[int], *, skip_special: bool = False) -> str:
        """Text of these ids; bytes that are not UTF-8 become U+FFFD."""
        ...

    def parse(self, token_ids: Sequence[int], text: str, *, calls: bool = True) -> AssistantTurn:
        """Read a generation's ids and text as an assistant turn; what cannot be read as a tool call stays content.

        Without `calls` nothing is read as one.
        """
        ...

    def digests(self) -> dict[str, str]:
        """SHA-256 hex digests for lineage, under `tokenizer`, `template` and `model` (the weights the engine
        started with; what is loaded later is named by its version). What the engine cannot know is left out.
        """
        ...

    async def set_weights(self, state: Mapping[str, torch.Tensor] | None, version: int) -> None:
        """Replace the weights between two tokens of whatever runs; None keeps them and only relabels the version.

        Raises:
            ValueError: a version below the loaded one, or tensors whose names or shapes do not fit.
        """
        ...
