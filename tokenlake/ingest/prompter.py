"""From a conversation and its parent to the ids the engine is given. Reads disk and renders: runs in threads.

The same code builds prompts at the gate and inside a serving process, so both places give the model the same ids.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from tokenlake.errors import DamagedLake, InvalidInput, NotFound, StorageFailed
from tokenlake.ingest.calls import Node
from tokenlake.ingest.capture import ParentLink
from tokenlake.ingest.engine import Message, Tool
from tokenlake.ingest.prefixes import Prefixes
from tokenlake.ingest.resolve import Cause
from tokenlake.ingest.splice import SpliceFailed, Template, splice

__all__ = ["Origin", "Prompt", "Prompter", "Renderer"]


class Renderer(Template, Protocol):
    """What building prompts needs of an engine."""

    def render(
        self, messages: Sequence[Message], tools: Sequence[Tool] | None, *, add_generation_prompt: bool
    ) -> list[int]:
        """The chat template's text as ids; raises `ValueError` for what it cannot express."""
        ...


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a prompt comes from."""

    parent: Node | None
    cause: Cause | None
    """Why it is a root; None with a parent."""


@dataclass(frozen=True, slots=True)
class Prompt(Origin):
    """What the engine is given."""

    ids: array[int]
    prefix: bytes
    """The parent's whole sequence as raw int32; empty of a root."""

    @property
    def link(self) -> ParentLink | None:
        """The parent as capture is told of it; None of a root."""
        return self.parent and ParentLink(
            call_id=self.parent.call_id,
            root_call_id=self.parent.root_call_id,
            depth=self.parent.depth,
            cum_len=self.parent.cum_len,
            chain_hash=self.parent.chain_hash,
            token_ids=self.prefix,
        )


class Prompter:
    """Builds prompts for one engine. `damaged` hears of every parent whose ids could not be read."""

    def __init__(self, engine: Renderer, prefixes: Prefixes, damaged: Callable[[], None]) -> None:
        self._engine = engine
        self._prefixes = prefixes
        self._damaged = damaged

    def build(
        self, messages: Sequence[Message], tools: Sequence[Tool] | None, parent: Node | None, cause: Cause | None
    ) -> Prompt:
        """The exact continuation of `parent`, or the whole conversation rendered as a root.

        A parent whose ids cannot be read or whose end cannot be proven makes a root with that cause. Raises
        `InvalidInput` for what the template cannot express.
        """
        tools = tools or None
        if parent is not None:
            try:
                prefix = self._prefixes.get(parent)
                spliced = splice(self._engine, array("i", prefix), messages, parent.turns, tools)
                return Prompt(parent, None, spliced.prompt_ids, prefix)
            except SpliceFailed:
                cause = "splice_failed"
            except (DamagedLake, StorageFailed, NotFound):
                self._damaged()
                cause = "prefix_unavailable"
        try:
            ids = array("i", self._engine.render(messages, tools, add_generation_prompt=True))
        except ValueError as error:
            why = f"the chat template cannot express this conversation: {error}"
            raise InvalidInput(why, field="messages") from error
        return Prompt(None, cause, ids, b"")

    def remember(self, prompt: Prompt, chain_hash: bytes, sequence: bytes) -> None:
        """Keep the whole sequence of a call with this prompt that was just staged: the next turn starts with it."""
        self._prefixes.put(prompt.parent, chain_hash, sequence)
