"""From a conversation and its parent to the ids the engine is given. Reads disk and renders: runs in threads."""

from __future__ import annotations

from array import array

from tokenlake.api.flight import Prompt
from tokenlake.api.metrics import Metrics
from tokenlake.api.prefixes import Prefixes
from tokenlake.errors import DamagedLake, InvalidInput, NotFound, StorageFailed
from tokenlake.ingest.engine import Engine
from tokenlake.ingest.messages import Conversation, to_messages
from tokenlake.ingest.resolve import Cause, Node
from tokenlake.ingest.splice import SpliceFailed, splice

__all__ = ["Prompter"]


class Prompter:
    """Builds prompts for one engine."""

    def __init__(self, engine: Engine, prefixes: Prefixes, metrics: Metrics) -> None:
        self._engine = engine
        self._prefixes = prefixes
        self._metrics = metrics

    def build(self, conversation: Conversation, parent: Node | None, cause: Cause | None) -> Prompt:
        """The exact continuation of `parent`, or the whole conversation rendered as a root.

        A parent whose ids cannot be read or whose end cannot be proven makes a root with that cause. Raises
        `InvalidInput` for what the template cannot express.
        """
        messages = to_messages(conversation.turns)
        tools = conversation.tools or None
        if parent is not None:
            try:
                prefix = self._prefixes.get(parent)
                spliced = splice(self._engine, array("i", prefix), messages, parent.turns, tools)
                return Prompt(spliced.prompt_ids, parent, prefix, None)
            except SpliceFailed:
                cause = "splice_failed"
            except (DamagedLake, StorageFailed, NotFound):
                self._metrics.digest_failures.inc()
                cause = "prefix_unavailable"
        try:
            ids = array("i", self._engine.render(messages, tools, add_generation_prompt=True))
        except ValueError as error:
            why = f"the chat template cannot express this conversation: {error}"
            raise InvalidInput(why, field="messages") from error
        return Prompt(ids, None, b"", cause)
