import json

import pytest

from onpolicy.config.groups.reward_flags import RULES
from onpolicy.rewards import dapo, exact, load_rule
from onpolicy.rewards.reasoning_gym import check_label, score
from onpolicy.rollout.generated_prompts import rows_of


@pytest.mark.parametrize(
    ("response", "label", "score"),
    [("42", "42", 1.0), (" 42\n", "42", 1.0), ("42.", "42", 0.0), ("", "42", 0.0)],
)
def test_exact(response, label, score):
    assert exact.score(response, label) == score


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


VERL = [
    # What verl's compute_score (b178a3cd) said: response, label, score, pred.
    ("Answer: The answer is $42$", "42", 1.0, "42"),
    ("Answer: The value is $42$.", "42", 1.0, "42"),
    ("Answer: $1{,}234$", "1234", 1.0, "1234"),
    ("Answer: $12,\\!345$", "12345", 1.0, "12345"),
    ("Answer: $90^\\circ$", "90", 1.0, "90"),
    ("Answer: 60^{\\circ}", "60", 1.0, "60"),
    ("Answer: \\text{42}", "42", 1.0, "42"),
    ("Answer: $\\textbf{42}$", "42", 1.0, "42"),
    ("Answer: \\overline{AB}", "AB", 1.0, "AB"),
    ('Answer: "42"', "42", 1.0, "42"),
    ("Answer: 42\\;", "42", 1.0, "42"),
    ("Answer: $\\boxed{42}$", "42", 1.0, "42"),
    ("Answer: \\frac12", "\\frac{1}{2}", 1.0, "\\frac{1}{2}"),
    ("Answer: \\sqrt[3]{2}", "\\sqrt[3]{2}", 1.0, "\\sqrt{[}3]{2}"),
    ("Final Answer: $x=\\frac34$", "\\frac{3}{4}", 1.0, "\\frac{3}{4}"),
    ("Answer: 5 \\text{ m}", "5", 1.0, "5"),
    ("Answer: 5 \\mbox{ cm}^2", "5", 1.0, "5"),
    ("Answer: 3^\\mathrm{th}", "3^", 1.0, "3^"),
    ("Answer: 1 \\text{ and } 2", "1,2", 1.0, "12"),
    ("Answer: $1$ and $2$", "1", 1.0, "1"),
    ("Answer: 36\\ldots", "36", 1.0, "36"),
    ("Answer: \\$36", "36", 1.0, "36"),
    ("Answer: an apple", "apple", 1.0, "apple"),
    ("Answer: x = 7", "7", 1.0, "7"),
    ("Answer: 1,234 dollars", "1234", 1.0, "1234"),
    ("Answer: 1,234 dollars.", "1234", -1.0, "1,234."),
    ("Answer: 42.", "42", -1.0, "42."),
    ("Answer: $42.$", "42", 1.0, "42"),
    ("Answer: 42.0", "42", -1.0, "42.0"),
    ("Answer: **42**", "42", -1.0, "**42**"),
    ("Answer: \\(42\\)", "42", -1.0, "\\(42\\)"),
    ("answer :\n42", "42", 1.0, "42"),
    ("Answer: 41\nAnswer: 42", "42", 1.0, "42"),
    ("Answer: 42\nAnswer: 41", "42", -1.0, "41"),
    ("Answer: 42" + " " * 290, "42", 1.0, "42"),
    ("Answer: 42" + " " * 291, "42", -1.0, "[INVALID]"),
    ("Answer:", "42", -1.0, "[INVALID]"),
    ("42", "42", -1.0, "[INVALID]"),
]


@pytest.mark.parametrize(("response", "label", "score", "pred"), VERL)
def test_the_score_and_the_answer_are_verls(response, label, score, pred):
    answered = pred != "[INVALID]"
    assert dapo.score(response, label) == {"score": score, "answered": float(answered)}
    assert dapo.answer(response) == (pred if answered else "")


@pytest.mark.parametrize("label", ["$", " ", "[INVALID]", "1\n2", "9" * 300])
def test_a_label_that_no_answer_can_meet_or_that_none_meets_is_refused(label):
    with pytest.raises(ValueError, match=r"nothing is left|without an answer|would be wrong"):
        dapo.check_label(label)


ROW = next(rows_of("reasoning-gym:chain_sum", 1, 0, "--prompt-data"))[1]
ANSWER = json.loads(ROW["label"])["answer"]


def test_its_own_scorer_judges_the_answer():
    assert score(ANSWER, ROW["label"]) == 1.0
    assert score(f"<answer>1</answer> No: <answer> {ANSWER} </answer>.", ROW["label"]) == 1.0
    assert score(f"<answer>{ANSWER}</answer> No: <answer>x</answer>.", ROW["label"]) == 0.0
    assert 0 < score(f"it is {ANSWER}", ROW["label"]) < 1


@pytest.mark.parametrize("label", ["4", "{}", "text", '{"name": "chain_sum"}'])
def test_a_label_must_be_a_problem(label):
    with pytest.raises(ValueError):
        check_label(label)
    check_label(ROW["label"])
