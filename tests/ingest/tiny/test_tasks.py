"""The calculator and the texts beside it."""

from __future__ import annotations

import pytest

from tokenlake.ingest.tiny.tasks import calculator, final_answer, operation_word


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("4 - 1", "3"),
        (" 98 + 93 - 77", "114"),
        ("-( 20 + 67 + -59 )", "-28"),
        ("2 - -1", "3"),
        ("( -9 / 9 )", "-1"),
        ("+3", "3"),
        ("1 / 4", "0.25"),
        ("0.1 + 0.2", "0.3"),
        ("1 / 3", "0.333333"),
        ("-0", "0"),
        ("999999 * 999999", "999998000001"),
    ],
)
def test_values(expression: str, value: str) -> None:
    assert calculator(expression) == value


@pytest.mark.parametrize(
    ("expression", "said"),
    [
        ("", "not an arithmetic expression"),
        ("1 +", "not an arithmetic expression"),
        ("1 + 1 )", "not an arithmetic expression"),
        ("1; 2", "not an arithmetic expression"),
        ("1\x00", "not an arithmetic expression"),
        ("007", "not an arithmetic expression"),
        ("1 / 0", "division by zero"),
        ("1 / (2 - 2)", "division by zero"),
        ("2 ** 9", "only numbers"),
        ("7 // 2", "only numbers"),
        ("__import__('os')", "only numbers"),
        ("x", "only numbers"),
        ("True", "only numbers"),
        ("'1'", "only numbers"),
        ("1j", "only numbers"),
        ("1e400", "error"),
        ("1e14 * 1e14", "too large"),
        ("(" * 150 + "1" + ")" * 49, "error"),
        ("1 + " * 100, "longer than 200"),
    ],
)
def test_bad_input_is_a_clear_text(expression: str, said: str) -> None:
    answer = calculator(expression)
    assert answer.startswith("error: ")
    assert said in answer


@pytest.mark.parametrize(
    ("expression", "word"),
    [
        ("1 + 2", "addition"),
        ("1 - -2", "subtraction"),
        ("1 + 2 - 3", "mixed"),
        ("-4", "none"),
        ("-( 2 * 3 )", "multiplication"),
    ],
)
def test_operation_word(expression: str, word: str) -> None:
    assert operation_word(expression) == word


@pytest.mark.parametrize(
    ("text", "number"),
    [("Answer: 42", "42"), ("-7", "-7"), ("Answer: 0.5.", "0.5"), ("", None), ("error: x", None), ("Answer: -", None)],
)
def test_final_answer(text: str, number: str | None) -> None:
    assert final_answer(text) == number
