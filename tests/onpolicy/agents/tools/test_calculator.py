import asyncio

import pytest

from onpolicy.agents.tools.calculator import Calculator, evaluate
from onpolicy.agents.tools.observation import counting


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("1 + 2 * 3", 7), (" (1+2)*-3 ", -9), ("7 // 2 + 7 % 4", 6), ("1 / 4", 0.25),
        ("2 ** 100", 2**100), ("2 ** -1", 0.5), ("sqrt(16) + max(1, 2)", 6.0),
        ("round(pi, 2)", 3.14),
    ],
)  # fmt: skip
def test_an_expression_has_pythons_value(expression, value):
    assert evaluate(expression) == value
    assert type(evaluate(expression)) is type(value)


@pytest.mark.parametrize(
    ("expression", "reason"),
    [
        ("", "not an arithmetic"), ("1 +", "not an arithmetic"), ("1 ^ 2", "is not arithmetic"),
        ("1,000", "is not arithmetic"), ("True + 1", "is not arithmetic"),
        ("'a' * 9", "is not arithmetic"), ("__import__('os')", "is not arithmetic"),
        ("(1).real", "is not arithmetic"), ("max(*[1])", "is not arithmetic"),
        ("x", "is not arithmetic"), ("1 / 0", "division by zero"),
        ("sqrt(-1)", "math domain error"), ("(-8) ** 0.5", "no finite real number"),
        ("1e308 * 10", "no finite real number"), ("9 ** 9 ** 9", "more than 4096 bits"),
        ("2 ** 4000 * 2 ** 4000", "more than 4096 bits"),
        ("round(1, -10 ** 100)", "round to more"), ("1" * 501, "longer than 500"),
        ("(" * 250 + ")" * 250, "not an arithmetic"), ("-" * 490 + "1" + "**1" * 3, None),
        ("min()", "min expected at least 1 argument"),
    ],
)  # fmt: skip
def test_what_is_no_arithmetic_or_costs_too_much_is_refused(expression, reason):
    if reason is None:
        assert evaluate(expression) == 1
        return
    with pytest.raises(ValueError, match=reason):
        evaluate(expression)


def test_calls_and_faults_are_counted_where_they_are_made():
    async def episode(expressions):
        with counting() as counts:
            observations = [await Calculator().run(each) for each in expressions]
        return observations, counts

    async def two():
        return await asyncio.gather(episode(["1+1", "x"]), episode(["2*2"]))

    (first, counts), (second, others) = asyncio.run(two())
    assert [each.text for each in first] == ["2", "error: 'x' is not arithmetic"]
    assert [each.fault for each in first] == [None, "expression"]
    assert counts == {"calculator_calls": 2, "calculator_faults/expression": 1}
    assert [each.text for each in second] == ["4"]
    assert others == {"calculator_calls": 1}
