"""The embedded engine's model as a Hugging Face directory, which vLLM serves.

The embedded network is a Qwen3 decoder under other names, so its weights are renamed and nothing is trained:

    python -m tokenlake.ingest.tiny.checkpoint runs/tiny-vllm

The output head, which is the embedding, is written once more: vLLM 0.32 for CPUs keeps the older one of a tied head
when it reloads weights.

What vLLM samples from it can be checked against `tokenlake.ingest.tiny.score`.
"""

# The stubs of torch and safetensors leave these partly unknown.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false

from __future__ import annotations

import argparse
import json
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file
from torch import Tensor

from tokenlake.ingest.tiny.engine import WEIGHTS_DIR
from tokenlake.ingest.tiny.model import TinyConfig
from tokenlake.ingest.tiny.tokenizer import END_OF_TEXT, END_OF_TURN, TinyTokenizer

__all__ = ["write_checkpoint", "write_weights"]

_TEMPLATE = Path(__file__).with_name("chat_template.jinja")
_NAMES = {
    "embedding": "model.embed_tokens",
    "norm": "model.norm",
    "attention_norm": "input_layernorm",
    "attention.query": "self_attn.q_proj",
    "attention.key": "self_attn.k_proj",
    "attention.value": "self_attn.v_proj",
    "attention.out": "self_attn.o_proj",
    "attention.query_norm": "self_attn.q_norm",
    "attention.key_norm": "self_attn.k_norm",
    "mlp_norm": "post_attention_layernorm",
    "gate": "mlp.gate_proj",
    "up": "mlp.up_proj",
    "down": "mlp.down_proj",
}


def _renamed(name: str) -> str:
    """A tensor's name in Qwen3's checkpoint."""
    stem, _, kind = name.rpartition(".")
    block = re.fullmatch(r"blocks\.(\d+)\.(.+)", stem)
    return f"model.layers.{block[1]}.{_NAMES[block[2]]}.{kind}" if block else f"{_NAMES[stem]}.{kind}"


def _template() -> str:
    """The embedded template for messages as servers pass them: OpenAI's tool calls, arguments parsed, no content."""
    text = _TEMPLATE.read_text(encoding="utf-8")
    text = text.replace("call.name | tojson", "call.function.name | tojson")
    text = text.replace("call.arguments", "call.function.arguments | tojson")
    return text.replace("message.content", "(message.content or '')").replace(
        "messages[0].content", "messages[0]['content']"
    )


def _config(tiny: TinyConfig, tokenizer: TinyTokenizer) -> dict[str, Any]:
    """Qwen3's `config.json`."""
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "vocab_size": tiny.vocab_size,
        "hidden_size": tiny.d_model,
        "intermediate_size": tiny.d_ff,
        "num_hidden_layers": tiny.n_layers,
        "num_attention_heads": tiny.n_heads,
        "num_key_value_heads": tiny.n_kv_heads,
        "head_dim": tiny.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": tiny.max_model_len,
        "rms_norm_eps": tiny.norm_eps,
        "rope_theta": tiny.rope_theta,
        "tie_word_embeddings": False,
        "attention_bias": False,
        "use_sliding_window": False,
        "torch_dtype": "float32",
        "eos_token_id": tokenizer.id_of(END_OF_TURN),
        "pad_token_id": tokenizer.pad_id,
    }


def write_weights(directory: Path, state: Mapping[str, Tensor]) -> None:
    """Write the weights of a state of the embedded model into a directory that `write_checkpoint` made."""
    weights = {_renamed(name): value.float().contiguous() for name, value in state.items()}
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"].clone()
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})


def write_checkpoint(directory: Path) -> None:
    """Write the shipped model: weights, tokenizer, template and configuration."""
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer = TinyTokenizer(WEIGHTS_DIR / "tokenizer.json")
    tiny = TinyConfig.read(WEIGHTS_DIR / "config.json")
    shutil.copyfile(WEIGHTS_DIR / "tokenizer.json", directory / "tokenizer.json")
    write_weights(directory, load_file(WEIGHTS_DIR / "model.safetensors"))
    documents = {
        "config.json": _config(tiny, tokenizer),
        "generation_config.json": {"eos_token_id": list(tokenizer.stop_ids), "pad_token_id": tokenizer.pad_id},
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "model_max_length": tiny.max_model_len,
            "eos_token": END_OF_TURN,
            "pad_token": END_OF_TEXT,
            "clean_up_tokenization_spaces": False,
            "chat_template": _template(),
        },
    }
    for name, document in documents.items():
        (directory / name).write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Write the embedded model as a directory that vLLM serves.")
    parser.add_argument("directory", type=Path)
    write_checkpoint(parser.parse_args().directory)
