"""The APIs that agents speak, each read into one form and written from one form.

A dialect turns a request into a `Conversation` and an `Answer` into what its SDK expects, streamed or whole. Nothing
behind it knows which one an agent speaks.
"""

from tokenlake.api.dialects.anthropic import AnthropicDialect
from tokenlake.api.dialects.chat import ChatDialect
from tokenlake.api.dialects.responses import ResponsesDialect

__all__ = ["AnthropicDialect", "ChatDialect", "ResponsesDialect"]
