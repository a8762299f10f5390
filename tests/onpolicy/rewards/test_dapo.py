"""--rm-type dapo gives what verl's math_dapo gives."""

import pytest

from onpolicy.rewards import dapo

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
