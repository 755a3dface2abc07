"""The chat template and tokenizer of the vLLM in this process.

It is asked as `/tokenize` and `/detokenize` would be, without HTTP: the ids are those that a gate in front of the same
server gets, so a conversation is rendered alike wherever it is captured.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from jinja2 import TemplateError
from vllm.entrypoints.serve.engine.protocol import ErrorResponse
from vllm.entrypoints.serve.tokenize.protocol import (
    DetokenizeRequest,
    TokenizeChatRequest,
    TokenizeCompletionRequest,
)
from vllm.exceptions import VLLMClientError

from tokenlake.ingest.upstream.template import UpstreamTemplate

__all__ = ["WorkerTemplate"]


class WorkerTemplate(UpstreamTemplate):
    """Belongs to the loop that serves; everything is called from other threads."""

    def __init__(self, model: str, serving: Any, stop_ids: tuple[int, ...], loop: asyncio.AbstractEventLoop) -> None:
        """`serving` is vLLM's `ServingTokenization`."""
        super().__init__(model, self._ask_here)
        self.stop_ids = stop_ids
        self._serving = serving
        self._loop = loop

    def _ask_here(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        return asyncio.run_coroutine_threadsafe(self._answer(path, body), self._loop).result()

    async def _answer(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        try:
            if path == "/detokenize":
                answer = await self._serving.create_detokenize(DetokenizeRequest(**body), None)
            elif "messages" in body:
                answer = await self._serving.create_tokenize(TokenizeChatRequest(**body), None)
            else:
                answer = await self._serving.create_tokenize(TokenizeCompletionRequest(**body), None)
        except (TemplateError, TypeError, VLLMClientError) as error:
            raise ValueError(str(error)) from error
        if isinstance(answer, ErrorResponse):
            raise ValueError(answer.error.message)
        return answer.model_dump()
