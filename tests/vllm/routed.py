"""Run by vLLM's interpreter: a tiny mixture-of-experts model samples, and its routed experts go through the recorder.

vLLM delivers routed experts only under its second model runner, which needs Triton and does not run on CPUs. Here its
own capturer is bound to the model by hand and what it caught is put where vLLM puts it; all else is as in a worker.
Prints
the extras of a root and of its child, and what transformers says of the same ids, as JSON.
"""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM
from vllm import LLM, SamplingParams
from vllm.model_executor.layers.fused_moe.routed_experts_capturer import (
    RoutedExpertsCapturer,
    bind_routed_experts_capturer,
)

from tokenlake.ingest.calls import Node
from tokenlake.ingest.prompter import Prompt
from tokenlake.ingest.routed_experts import Routing
from tokenlake.ingest.vllm.recording import RecordedEngine

LAYERS, TOP, EXPERTS = 2, 2, 4


def make(directory: Path) -> Any:
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=128, hidden_size=64, intermediate_size=64, moe_intermediate_size=64, num_hidden_layers=LAYERS,
        num_attention_heads=2, num_key_value_heads=2, head_dim=32, num_experts=EXPERTS, num_experts_per_tok=TOP,
        norm_topk_prob=True, decoder_sparse_step=1, max_position_embeddings=256, initializer_range=0.3,
        tie_word_embeddings=False,
    )  # fmt: skip
    model = Qwen3MoeForCausalLM(config).float().eval()
    model.save_pretrained(directory)
    return model


class Caught:
    """What vLLM's capturer caught: a row for every token that was fed."""

    def __init__(self, model: Any, config: Any) -> None:
        self.rows: list[np.ndarray] = []
        capturer = RoutedExpertsCapturer(64, config)
        capture = capturer.capture

        def kept(layer: int, ids: torch.Tensor) -> None:
            capture(layer, ids)
            if layer == LAYERS - 1:
                self.rows.append(capturer.snapshot_routing_data(len(ids)).numpy())

        capturer.capture = kept
        bind_routed_experts_capturer(model, capturer)


class Engine:
    """vLLM's engine as the recorder asks it."""

    def __init__(self, llm: LLM, caught: Caught) -> None:
        self.llm, self.caught = llm, caught

    async def generate(self, prompt: Any, params: Any, request_id: str, **more: Any) -> Any:
        self.caught.rows.clear()
        (made,) = self.llm.generate(prompt, params, use_tqdm=False)
        rows = np.concatenate(self.caught.rows)[: len(made.prompt_token_ids) + len(made.outputs[0].token_ids) - 1]
        made.outputs[0].routed_experts = rows[params.routed_experts_prompt_start :]
        yield made


async def record(engine: Engine, prompt: Prompt) -> Any:
    taken: list[Any] = []
    recorded = RecordedEngine(engine, prompt, taken.append, Routing(layers=LAYERS, per_token=TOP, experts=EXPERTS))
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    async for _ in recorded.generate({"prompt_token_ids": prompt.ids.tolist()}, params, "r"):
        pass
    return taken[0]


def main(directory: Path) -> None:
    reference = make(directory)
    llm = LLM(
        str(directory), dtype="float32", max_model_len=256, enforce_eager=True, skip_tokenizer_init=True,
        distributed_executor_backend="uni", enable_prefix_caching=False,
    )  # fmt: skip
    runner = llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner
    engine = Engine(llm, Caught(runner.model, runner.vllm_config))
    from array import array

    root = Prompt(None, "no_history", array("i", [5, 9, 31, 77, 2]), b"")
    first = asyncio.run(record(engine, root))
    whole = [*root.ids, *first.token_ids]
    parent = Node(
        call_id="c0", parent_call_id=None, before=None, root_call_id="c0", depth=0, cum_len=len(whole),
        chain_hash=bytes(32), fingerprint=b"", context=b"", preamble=b"", turns=1, reasoning=(), place=None,
    )  # fmt: skip
    child = Prompt(parent, None, array("i", [*whole, 40, 41]), array("i", whole).tobytes())
    second = asyncio.run(record(engine, child))
    ids = [*child.ids, *second.token_ids]
    with torch.no_grad():
        said = reference(torch.tensor([ids]), output_router_logits=True).router_logits
    routed = torch.stack([layer.topk(TOP).indices for layer in said], 1)
    sys.stdout.write(json.dumps({
        "extras": [first.extras, second.extras],
        "faults": [first.fault, second.fault],
        "lengths": [len(whole), len(ids)],
        "routed": routed.tolist(),
    }) + "\n")  # fmt: skip


if __name__ == "__main__":
    main(Path(sys.argv[1]))
