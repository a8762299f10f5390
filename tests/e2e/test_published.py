"""`onpolicy verify` on real engines, for checkpoints as their publishers ship them."""

import pytest

from onpolicy.config.groups import ModelConfig
from onpolicy.config.tool_flags import VerifyConfig
from onpolicy.run.commands.verification import passes, verify
from tests.support.published import DEQUANTIZED, make_published

pytestmark = pytest.mark.engine


@pytest.mark.parametrize(
    ("name", "sglang_args"),
    [
        ("phi-4-mini-instruct", ()),  # code of its own, tied, long factors
        ("phi-3.5-mini-instruct", ("--context-length", "64")),  # short factors
        ("kimi-k2-instruct", ()),  # a model_type that transformers does not know
        ("qwen3-vl-4b-instruct", ()),  # the text part of a model that also sees
        ("gemma-3-1b-it-cut", ()),  # fewer layers than its pattern, several ids that end a text
    ],
)
def test_no_token_of_a_published_checkpoint_differs(name, sglang_args, tmp_path):
    path = make_published(tmp_path / "model", name, dequantized=name in DEQUANTIZED)
    config = VerifyConfig(
        model=ModelConfig(hf_checkpoint=str(path), trust_remote_code=True),
        sglang_args=sglang_args,
        num_prompts=8,
        max_prompt_len=32 if sglang_args else None,
        max_new_tokens=16,
        run_dir=str(tmp_path / "run"),
    )
    report = verify(config)
    assert passes(report, config)
    context = {"phi-4-mini-instruct": 256, "phi-3.5-mini-instruct": 64}.get(name)
    assert report["contract"]["context"] == context
