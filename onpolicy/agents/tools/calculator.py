"""Calculator: Python's arithmetic, in expressions whose cost is known before anything is computed.

There are integers and floats, the operators + - * / // % **, parentheses, the functions abs, min,
max, round, sqrt, exp, log, sin, cos, tan, and the constants pi and e. Integers are exact; / makes a
float, as in Python. `^` and thousands separators, which readers take differently, are refused.
"""

from __future__ import annotations

import ast
import math
import operator
from collections.abc import Callable

from onpolicy.agents.tools.observation import Observation, counted

MAX_LENGTH = 500
"""The most characters of an expression."""

MAX_BITS = 4096
"""The most bits of an integer, given or computed on the way."""

Number = int | float

OPERATORS: dict[type[ast.operator], Callable[[Number, Number], Number]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
}
SIGNS: dict[type[ast.unaryop], Callable[[Number], Number]] = {
    ast.UAdd: operator.pos,
    ast.USub: operator.neg,
}
FUNCTIONS: dict[str, Callable[..., Number]] = {
    "abs": abs, "min": min, "max": max, "round": round, "sqrt": math.sqrt, "exp": math.exp,
    "log": math.log, "sin": math.sin, "cos": math.cos, "tan": math.tan,
}  # fmt: skip
CONSTANTS = {"pi": math.pi, "e": math.e}


class Calculator:
    """A calculator. One object serves any number of episodes at once."""

    async def run(self, expression: str) -> Observation:
        """Return the value, or an error message with the fault 'expression'."""
        try:
            observation = Observation(repr(evaluate(expression)))
        except ValueError as error:
            observation = Observation(f"error: {error}", fault="expression")
        return counted("calculator", observation)


def evaluate(expression: str) -> Number:
    """Return the value of an expression. Raises ValueError if it has none, or beyond limits."""
    if len(expression) > MAX_LENGTH:
        raise ValueError(f"longer than {MAX_LENGTH} characters")
    try:
        tree = ast.parse(expression.strip(), mode="eval")
        value = _value(tree.body)
    except (ArithmeticError, TypeError) as error:
        raise ValueError(str(error)) from error
    except (SyntaxError, RecursionError, MemoryError) as error:
        raise ValueError("not an arithmetic expression") from error
    return value


def _value(node: ast.expr) -> Number:
    match node:
        case ast.Constant(value=int() | float() as number) if not isinstance(number, bool):
            return _bounded(number)
        case ast.Name(id=name) if name in CONSTANTS:
            return CONSTANTS[name]
        case ast.UnaryOp(op=sign, operand=operand) if type(sign) in SIGNS:
            return SIGNS[type(sign)](_value(operand))
        case ast.BinOp(left=left, op=op, right=right) if type(op) in OPERATORS:
            return _combined(op, _value(left), _value(right))
        case ast.Call(func=ast.Name(id=name), args=arguments, keywords=[]) if name in FUNCTIONS:
            return _called(name, [_value(argument) for argument in arguments])
    raise ValueError(f"{ast.unparse(node)!r} is not arithmetic")


def _combined(op: ast.operator, left: Number, right: Number) -> Number:
    are_exact = isinstance(left, int) and isinstance(right, int)
    if isinstance(op, ast.Pow) and are_exact and abs(left) > 1:
        _require_bits(math.log2(abs(left)) * right)
    return _bounded(OPERATORS[type(op)](left, right))


def _called(name: str, arguments: list[Number]) -> Number:
    digits = arguments[1] if name == "round" and len(arguments) == 2 else 0
    if abs(digits) > MAX_BITS:
        raise ValueError(f"round to more than {MAX_BITS} digits")
    return _bounded(FUNCTIONS[name](*arguments))


def _bounded(value: object) -> Number:
    """Return a value. Raises ValueError if it is no real number, not finite, or too large."""
    if isinstance(value, int):
        _require_bits(value.bit_length())
    elif not isinstance(value, float) or not math.isfinite(value):
        raise ValueError("no finite real number")
    return value


def _require_bits(count: float) -> None:
    if count > MAX_BITS:
        raise ValueError(f"an integer of more than {MAX_BITS} bits")
