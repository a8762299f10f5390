import dataclasses
from types import SimpleNamespace

import pytest

from onpolicy.errors import ContractError
from onpolicy.models.hf_config import load_config
from sglang_patches import configurations, registry
from tests.support.published import make_published
from tests.support.tiny_contract import CONTRACT


@pytest.mark.parametrize("context", [64, 256])
def test_the_engine_reads_what_the_trainer_computes_with(context, tmp_path):
    path = str(make_published(tmp_path, "phi-4-mini-instruct"))
    contract = dataclasses.replace(CONTRACT, context=context)
    theirs = configurations.trainers_config(path, True, contract).to_dict()
    assert theirs == load_config(path, context=context).to_dict()
    assert theirs != load_config(path, context=320 - context).to_dict()


def test_an_engine_of_another_context_is_refused(monkeypatch):
    contract = dataclasses.replace(CONTRACT, context=256)
    monkeypatch.setattr(registry, "report", {"contract": contract.to_json()})

    def loaded(context):
        runner = SimpleNamespace(model_config=SimpleNamespace(context_len=context))
        return configurations._require_context("result", runner)

    assert loaded(256) == "result"
    with pytest.raises(ContractError, match=r"context_len=64.*chosen for 256 tokens"):
        loaded(64)
