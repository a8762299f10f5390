import pytest

from onpolicy.config.groups.reward import RULES
from onpolicy.rewards import exact, load_rule, math


@pytest.mark.parametrize(
    ("response", "label", "score"),
    [("42", "42", 1.0), (" 42\n", "42", 1.0), ("42.", "42", 0.0), ("", "42", 0.0)],
)
def test_exact(response, label, score):
    assert exact.score(response, label) == score


@pytest.mark.parametrize(
    ("response", "label", "score"),
    [
        (r"so the answer is \boxed{42}", "42", 1.0),
        (r"\boxed{\frac{1}{2}}", "0.5", 1.0),
        (r"\boxed{\frac{2}{4}}", r"\frac{1}{2}", 1.0),
        (r"first \boxed{1}, no: \boxed{2}", "2", 1.0),
        (r"\boxed{x^2 + 2x + 1}", "(x+1)^2", 1.0),
        ("The answer is 7.", "7", 1.0),
        (r"\boxed{41}", "42", 0.0),
        ("I do not know", "42", 0.0),
        ("", "42", 0.0),
    ],
)
def test_math(response, label, score):
    assert math.score(response, label) == score


@pytest.mark.parametrize(
    ("rule", "response", "answer"),
    [
        ("exact", " 42\n", "42"),
        ("math", r"\boxed{1}, no: \boxed{0.5}", "1/2"),
        ("math", r"so it is $\frac{2}{4}$", "1/2"),
        ("math", "I do not know", ""),
        ("math", r"\boxed{10^{5000}\%}", r"10^{5000}\%"),
        ("dapo", "Answer: 1\nAnswer: $1,234$ dollars", "1234"),
        ("dapo", "1234", ""),
        ("reasoning_gym", "<answer> 3 </answer>", "3"),
        ("reasoning_gym", " 3 ", "3"),
    ],
)
def test_what_a_rule_reads_of_a_response(rule, response, answer):
    assert load_rule(rule).answer(response) == answer


@pytest.mark.parametrize(("rule", "label"), [("exact", "  "), ("math", "?!"), ("dapo", "$")])
def test_a_label_that_the_rule_cannot_read_is_refused(rule, label):
    with pytest.raises(ValueError):
        load_rule(rule).check_label(label)


@pytest.mark.parametrize("rule", RULES)
def test_ordinary_labels_are_readable(rule):
    load_rule(rule).check_label("34")
