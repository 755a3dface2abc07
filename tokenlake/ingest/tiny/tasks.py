"""The texts the tiny model was trained on, and the calculator it calls.

A model of this size knows only the conversations it has seen, so whoever drives it takes these texts as they are. The
questions are those of the `chain_sum` and `basic_arithmetic` data sets of the reasoning_gym package.
"""

from __future__ import annotations

import ast
from fractions import Fraction
from typing import Any

__all__ = [
    "CALCULATOR_TOOL",
    "FOLLOW_UPS",
    "SIDE_SYSTEM_PROMPT",
    "SIDE_TASK",
    "SUMMARY_DONE",
    "SUMMARY_OPEN",
    "SYSTEM_PROMPT",
    "SYSTEM_PROMPTS",
    "calculator",
    "final_answer",
    "operation_word",
]

SYSTEM_PROMPT = "You solve arithmetic. Use the calculator, then answer with the number only."
SYSTEM_PROMPTS = (
    SYSTEM_PROMPT,
    "You are a careful assistant. Use the calculator for every problem.",
    "Solve the problem with the calculator tool and give the final answer.",
    "You are an agent with a calculator. Check your work.",
)
"""The first is the usual one; the model saw each of them."""

CALCULATOR_TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "calculator",
        "description": "Evaluate an arithmetic expression.",
        "parameters": {
            "type": "object",
            "properties": {"expression": {"type": "string"}},
            "required": ["expression"],
        },
    },
}

FOLLOW_UPS = (
    "Are you sure? Check once more.",
    "Please verify with the calculator.",
    "Repeat the final answer.",
)
"""User turns after an answer; the model calls the calculator again (mostly, the first two) or repeats the answer."""

SUMMARY_DONE = "Summary: the problem was: {question} The calculator gave {result}. Continue."
"""A compacted conversation after the tool call; the model answers."""
SUMMARY_OPEN = "Summary: the problem is: {question} Nothing is computed yet. Continue."
"""A compacted conversation before the tool call; the model calls the calculator."""

SIDE_SYSTEM_PROMPT = "You name operations."
"""System prompt of a forked sub-conversation without tools, whose user turn is the question and then `SIDE_TASK`."""
SIDE_TASK = "Name the operation in one word."
"""As a user turn after an answer, or behind the question and a newline; the model answers with `operation_word`."""

_LIMIT = 10**15
_WORDS = {"+": "addition", "-": "subtraction", "*": "multiplication", "/": "division"}


def calculator(expression: str) -> str:
    """Evaluate `+ - * /`, brackets and signs over integers and decimals; exact where the result is a whole number.

    Never raises: a bad expression gives a text that starts with `error: `, as a tool would tell the model.
    """
    if len(expression) > 200:
        return "error: the expression is longer than 200 characters"
    try:
        value = _value(ast.parse(expression.strip(), mode="eval").body)
    except SyntaxError:
        return "error: not an arithmetic expression"
    except ZeroDivisionError:
        return "error: division by zero"
    except (ValueError, RecursionError, MemoryError) as error:
        return f"error: {str(error) or 'the expression is too deep'}"
    return str(value.numerator) if value.denominator == 1 else f"{float(value):.6g}"


def _value(node: ast.expr) -> Fraction:
    match node:
        case ast.Constant(value=int() | float() as number) if not isinstance(number, bool):
            value = Fraction(str(number))
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            value = -_value(operand)
        case ast.UnaryOp(op=ast.UAdd(), operand=operand):
            value = _value(operand)
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            value = _value(left) + _value(right)
        case ast.BinOp(left=left, op=ast.Sub(), right=right):
            value = _value(left) - _value(right)
        case ast.BinOp(left=left, op=ast.Mult(), right=right):
            value = _value(left) * _value(right)
        case ast.BinOp(left=left, op=ast.Div(), right=right):
            value = _value(left) / _value(right)
        case _:
            raise ValueError("only numbers, brackets and + - * / are allowed")
    if abs(value) > _LIMIT:
        raise ValueError("the number is too large")
    return value


def operation_word(expression: str) -> str:
    """The one word for an expression's operators: `addition`, ..., `mixed` for several, `none` without any.

    An operator is a sign between spaces, as the questions write it; a sign on a number is not one.
    """
    words = {_WORDS[token] for token in expression.split() if token in _WORDS}
    if len(words) > 1:
        return "mixed"
    return words.pop() if words else "none"


def final_answer(text: str) -> str | None:
    """The number an answer states (`Answer: 42`, or `42`), without the words around it; None when there is none."""
    words = text.strip().rstrip(".").split()
    if not words:
        return None
    last = words[-1]
    return last if last.lstrip("-").replace(".", "", 1).isdigit() else None
