"""What a worker over vLLM says of itself: asked of vLLM's own objects once, before the first call."""

from __future__ import annotations

import hashlib
import json
from array import array
from collections.abc import Mapping
from typing import Any

from tokenlake.errors import ConfigError
from tokenlake.ingest.engine import LogprobMode
from tokenlake.ingest.routed_experts import Routing
from tokenlake.ingest.upstream.template import UpstreamTemplate
from tokenlake.ingest.worker_facts import WorkerFacts

__all__ = ["read_facts", "read_routing", "stop_ids_of"]

_MODES: dict[str, LogprobMode] = {"raw_logprobs": "raw", "processed_logprobs": "processed"}
_QUESTION = {"role": "user", "content": "Probe x"}
_ANSWER = {"role": "assistant", "content": "Probe y"}


def stop_ids_of(engine: Any) -> tuple[int, ...]:
    """Every id that ends a generation of this engine, the tokenizer's own first."""
    stated: Any = engine.input_processor.generation_config_fields.get("eos_token_id")
    more: Any = engine.model_config.get_diff_sampling_param().get("stop_token_ids")
    ids = [engine.renderer.get_eos_token_id()]
    for given in (stated, more):
        ids += given if isinstance(given, list) else [given]
    return tuple(dict.fromkeys(token for token in ids if token is not None))


def read_routing(engine: Any) -> Routing | None:
    """How the model routes, where the engine was asked to give it (`--enable-return-routed-experts`)."""
    if not engine.vllm_config.aux_output_config.enable_return_routed_experts:
        return None
    model = engine.model_config
    return Routing(
        layers=model.get_total_num_hidden_layers(),
        per_token=model.get_num_experts_per_tok(),
        experts=model.get_num_experts(),
    )


def read_facts(
    *,
    worker_id: str,
    lake_id: str,
    engine: Any,
    arguments: Any,
    template: UpstreamTemplate,
    tokenizer: Mapping[str, Any],
) -> WorkerFacts:
    """The facts of a vLLM that is up. Renders: for a thread. Raises `ConfigError` for what cannot be captured.

    `tokenizer` is what `/tokenizer_info` would answer.
    """
    model = engine.model_config
    mode = _MODES.get(str(model.logprobs_mode))
    if mode is None:
        raise ConfigError(f"--logprobs-mode {model.logprobs_mode} gives no log-probabilities: use raw_logprobs")
    if model.hf_config.model_type == "gpt_oss":
        raise ConfigError("this model's chats are not rendered by a template: capture it with --capture gate")
    stops = stop_ids_of(engine)
    prompt = template.render([_QUESTION], None, add_generation_prompt=True)
    closed = template.render([_QUESTION, _ANSWER], None, add_generation_prompt=False)
    if template.encode(template.decode(closed)) != closed or template.encode(template.decode(prompt)) != prompt:
        raise ConfigError("the tokenizer does not give back the ids of its own rendering: prompts cannot be spliced")
    pads = [engine.renderer.get_tokenizer().pad_token_id]
    tools = bool(arguments.enable_auto_tool_choice and arguments.tool_call_parser)
    return WorkerFacts(
        worker_id=worker_id,
        lake_id=lake_id,
        model=template.model,
        max_model_len=model.max_model_len,
        stop_ids=stops,
        pad_id=next(token for token in (*pads, *stops, 0) if token is not None),
        vocab_size=model.get_vocab_size(),
        logprob_mode=mode,
        opens_thinking=template.decode(prompt).rstrip().endswith("<think>"),
        parses=tools or bool(arguments.structured_outputs_config.reasoning_parser),
        parses_tools=tools,
        tokenizer_digest=hashlib.sha256(json.dumps(tokenizer, sort_keys=True).encode()).hexdigest(),
        template_digest=hashlib.sha256(array("i", prompt).tobytes() + array("i", closed).tobytes()).hexdigest(),
    )
