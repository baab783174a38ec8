"""A calculator as a tool of your own: `gateway.tools.calculator = "calculator.py:calculator"`.

It accepts arithmetic alone, and bounds the time and the memory that an expression takes.
"""

from __future__ import annotations

import ast
import math
import operator
from collections.abc import Callable, Mapping

MAX_CHARACTERS = 1000
MAX_DEPTH = 60
MAX_BITS = 4096
"""Of an integer anywhere in the calculation."""
Number = int | float

_CONSTANTS: Mapping[str, float] = {"pi": math.pi, "e": math.e, "tau": math.tau, "inf": math.inf}
_FUNCTIONS: Mapping[str, Callable[..., Number]] = {
    "abs": abs,
    "ceil": math.ceil,
    "cos": math.cos,
    "exp": math.exp,
    "floor": math.floor,
    "gcd": math.gcd,
    "log": math.log,
    "log10": math.log10,
    "log2": math.log2,
    "max": max,
    "min": min,
    "round": round,
    "sin": math.sin,
    "sqrt": math.sqrt,
    "tan": math.tan,
}


class CalculationError(Exception):
    """An expression that cannot be evaluated, in words for the model."""


def calculator(expression: str) -> str:
    """Evaluates an arithmetic expression, for example (3 + 4) * 2 ** 10 / sqrt(2), and returns its
    value.
    """
    if len(expression) > MAX_CHARACTERS:
        raise CalculationError(f"the expression has more than {MAX_CHARACTERS} characters")
    try:
        tree = ast.parse(expression.strip(), mode="eval")
        value = _value(tree.body, 0)
    except (SyntaxError, RecursionError, MemoryError) as error:
        raise CalculationError("this is not an arithmetic expression") from error
    except ZeroDivisionError as error:
        raise CalculationError("division by zero") from error
    except (ArithmeticError, ValueError, TypeError) as error:
        raise CalculationError(str(error)) from error
    return str(value)


def _value(node: ast.expr, depth: int) -> Number:
    if depth > MAX_DEPTH:
        raise CalculationError("the expression is nested too deeply")
    match node:
        case ast.Constant(value=int() | float() as value) if not isinstance(value, bool):
            return _bounded(value)
        case ast.Name(id=name) if name in _CONSTANTS:
            return _CONSTANTS[name]
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_value(operand, depth + 1)
        case ast.UnaryOp(op=ast.UAdd(), operand=operand):
            return _value(operand, depth + 1)
        case ast.BinOp(left=left, op=symbol, right=right):
            if type(symbol) not in _OPERATORS:
                raise CalculationError("only + - * / // % ** can be used; for powers **, not ^")
            operation = _OPERATORS[type(symbol)]
            return _bounded(operation(_value(left, depth + 1), _value(right, depth + 1)))
        case ast.Call(func=ast.Name(id=name), args=arguments, keywords=[]) if name in _FUNCTIONS:
            return _bounded(_FUNCTIONS[name](*(_value(one, depth + 1) for one in arguments)))
    raise CalculationError(
        f"only numbers, + - * / // % ** and these can be used: "
        f"{', '.join([*_FUNCTIONS, *_CONSTANTS])}"
    )


def _power(base: Number, exponent: Number) -> Number:
    # Bounds the size before the work is done; sums and products of bounded numbers need no such
    # care.
    whole = isinstance(base, int) and isinstance(exponent, int) and abs(base) > 1
    if whole and (int(abs(base)).bit_length() - 1) * abs(exponent) > MAX_BITS:
        raise CalculationError(f"the result has more than {MAX_BITS} bits")
    value = base**exponent
    if isinstance(value, complex):
        raise CalculationError("the result is not a real number")
    return value


def _bounded(value: Number) -> Number:
    if isinstance(value, int) and value.bit_length() > MAX_BITS:
        raise CalculationError(f"the result has more than {MAX_BITS} bits")
    return value


_OPERATORS: Mapping[type[ast.operator], Callable[..., Number]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: _power,
}
