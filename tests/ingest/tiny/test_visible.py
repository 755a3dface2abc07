"""What is shown of a generation that goes on is how the turn begins, whatever comes later."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tokenlake.ingest.tiny.engine import WEIGHTS_DIR
from tokenlake.ingest.tiny.tokenizer import TinyTokenizer
from tokenlake.ingest.tiny.visible import Visible
from tokenlake.ingest.toolcalls import certain, parse_turn

TOKENIZER = TinyTokenizer(WEIGHTS_DIR / "tokenizer.json")
CALL = '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'
PIECES = st.sampled_from(
    ["<think>", "</think>", "<tool_call>", "</tool_call>", "<think", "<", "\n", " ", "a", "é", "STOP", CALL, "</t"]
)


@given(st.lists(PIECES, max_size=8).map("".join))
def test_what_is_certain_is_how_the_turn_begins(text: str) -> None:
    turn = parse_turn(text)
    shown = ("", "")
    for end in range(len(text) + 1):
        grown = certain(text[:end])
        assert all(new.startswith(old) for new, old in zip(grown, shown, strict=True))
        shown = grown
    assert (turn.reasoning or "").startswith(shown[0])
    assert (turn.content or "").startswith(shown[1])


def streamed(text: str, *stop: str) -> dict[str, str]:
    visible = Visible(TOKENIZER, stop)
    told = {"reasoning": "", "content": ""}
    for token_id in TOKENIZER.encode(text):
        for delta in visible.feed(token_id):
            assert delta.text
            told[delta.kind] += delta.text
    return told


def test_text_flows_and_what_is_not_certain_waits() -> None:
    assert streamed("<think>\nwhy\n</think>\n\nthe answer ") == {"reasoning": "why", "content": "the answer"}
    assert streamed("see" + CALL + "more") == {"reasoning": "", "content": "see"}
    assert streamed("say STO", "STOP") == {"reasoning": "", "content": "say"}
    assert streamed("say STOMP", "STOP") == {"reasoning": "", "content": "say STOMP"}
    assert streamed(" kept if no call follows") == {"reasoning": "", "content": ""}


def test_half_a_character_waits_for_its_rest() -> None:
    visible = Visible(TOKENIZER, ())
    pieces = [[delta.text for delta in visible.feed(token_id)] for token_id in TOKENIZER.encode("日本")]
    assert [text for piece in pieces for text in piece] == ["日", "本"]
    assert len(pieces) > 2, "each character is several tokens"
