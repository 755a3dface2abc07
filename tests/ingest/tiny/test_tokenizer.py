"""The tokenizer: any text survives, digits and markers are single tokens."""

from __future__ import annotations

import random
import sys

import pytest

from tokenlake.ingest.tiny import TinyEngine

SURROGATES = range(0xD800, 0xE000)


@pytest.mark.parametrize(
    "text",
    [
        "",
        " ",
        "\n\n  x\t",
        "héllo",
        "日本語 12 345",
        "👩‍👩‍👧\u200d",
        "\x00\x1f\x7f",
        "a\r\nb",
        "<|im_end|>",
        "<|im_start",
        "e\u0301",
    ],
)
def test_round_trip(idle_engine: TinyEngine, text: str) -> None:
    assert idle_engine.decode(idle_engine.encode(text)) == text


def test_round_trip_of_arbitrary_unicode(idle_engine: TinyEngine) -> None:
    rng = random.Random(0)
    for _ in range(300):
        points = (rng.randrange(rng.choice([0x80, 0x800, sys.maxunicode + 1])) for _ in range(rng.randrange(40)))
        text = "".join(chr(point) for point in points if point not in SURROGATES)
        assert idle_engine.decode(idle_engine.encode(text)) == text


def test_every_id_is_below_the_vocabulary_size(idle_engine: TinyEngine) -> None:
    ids = idle_engine.encode("".join(chr(point) for point in range(1, 0x3000)))
    assert 0 <= min(ids) <= max(ids) < idle_engine.vocab_size


def test_a_lone_surrogate_is_refused(idle_engine: TinyEngine) -> None:
    with pytest.raises(ValueError, match="UTF-8"):
        idle_engine.encode("a\ud800")


def test_bytes_that_are_not_utf8_become_replacement_characters(idle_engine: TinyEngine) -> None:
    first, *_ = idle_engine.encode("\U0010fffd")
    assert idle_engine.decode([first]) == "\ufffd"


def test_digits_and_markers_are_single_tokens(idle_engine: TinyEngine) -> None:
    assert len(idle_engine.encode("9876543210")) == 10
    for marker in ("<|im_start|>", "<|im_end|>", "<|endoftext|>", "<tool_call>", "</tool_call>", "<think>", "</think>"):
        assert len(idle_engine.encode(marker)) == 1


def test_skip_special_leaves_the_markers_of_thinking_and_tools(idle_engine: TinyEngine) -> None:
    ids = idle_engine.encode("<think>a</think><tool_call>b</tool_call><|im_end|><|endoftext|>")
    assert idle_engine.decode(ids, skip_special=True) == "<think>a</think><tool_call>b</tool_call>"


def test_stop_and_pad_ids(idle_engine: TinyEngine) -> None:
    assert [idle_engine.decode([stop]) for stop in idle_engine.stop_ids] == ["<|im_end|>", "<|endoftext|>"]
    assert idle_engine.decode([idle_engine.pad_id]) == "<|endoftext|>"
