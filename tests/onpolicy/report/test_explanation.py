"""The page of `onpolicy explain`."""

import math
import re

from onpolicy.explain.text import told
from onpolicy.report.explanation import render


def site(module, operator, *, rows=100, inputs=0, outputs=0, own=0):
    return {
        "site": (module, operator, 0), "rows": rows, "inputs_differ": inputs,
        "outputs_differ": outputs, "own": own,
    }  # fmt: skip


RESULT = {
    "num_mismatched_tokens": 2,
    "num_compared_tokens": 3,
    "k3_kl_mean": 1e-6,
    "max_abs_diff": 0.5,
    "first_token": {
        "sequence": 0, "response_position": 1, "rollout_log_prob": -1.0, "train_log_prob": -1.5,
    },
    "source": {
        "name": "linear of layers.1.self_attn.<q>", "cause": "operator", "sequence": 0, "position": 4,
        "site": ("layers.1.self_attn.<q>", "linear", 0), "before": ("embed_tokens", "embedding", 0),
        "rollout_shape": (3, 8), "train_shape": (1, 40, 8),
    },
    "proof": None,
    "sites": [
        site("embed_tokens", "embedding"),
        site("layers.0.self_attn.<q>", "linear"),
        site("layers.1.self_attn.<q>", "linear", outputs=7, own=7),
        site("layers.1.self_attn", "attention", inputs=80, outputs=80),
        site("lm_head", "linear", rows=3, inputs=2, outputs=2),
    ],
    "responses": [
        {
            "tokens": [5, 9, 7], "rollout_log_probs": [-1.0, -1.0, math.nan],
            "train_log_probs": [-1.0, -1.5, math.nan],
        },
    ],
}  # fmt: skip


def test_a_layer_is_a_row_and_an_operator_a_column():
    page = render(RESULT, told(RESULT))
    layers, others = re.findall(r"<table class=heat>.*?</table>", page)
    rows = [re.findall(r"<t[dh][^>]*>[^<]*(?:<span>[^<]*)?", row) for row in layers.split("<tr>")]
    assert [len(row) for row in rows[1:]] == [3, 3, 3]
    assert re.findall(r'<td class="(.*?)"', layers) == ["same", "own s1", "given s4"]
    assert re.findall(r'<td class="(.*?)"', others) == ["same", "given s4"]
    assert "attention of layers.1.self_attn: of 100 rows 80 differ, 0 of them for equal" in layers


def test_tokens_are_coloured_by_their_difference_and_nan_is_one():
    page = render(RESULT, "")
    tokens = re.findall(r'<span class="([^"]*)" title="rollout [^"]*">(\d+)</span>', page)
    assert tokens == [("same", "5"), ("own s5", "9"), ("own s5", "7")]


def test_the_page_needs_no_network_and_makes_no_html_of_names():
    page = render(RESULT, "<script>alert(1)</script>")
    assert "<script" not in page and "http" not in page and "<q>" not in page
