"""A contract as SGLang's flags and environment."""

import dataclasses

import pytest

from onpolicy.contract import CONTRACT_VARIABLE, NumericsContract, OperatorShapes
from onpolicy.rollout.engine_args import EngineSpec, engine_environment, engine_flags

SHAPES = OperatorShapes(linear=(), heads=1, kv_heads=1, head_dim=1, norm=(), vocab_size=1)
ALIGNED = NumericsContract(backend="cpu", device="cpu", dtype="float32", shapes=SHAPES)
STOCK = dataclasses.replace(ALIGNED, backend="stock")
ON_GPU = dataclasses.replace(STOCK, device="cuda")


def spec_of(contract, **changes):
    values = {
        "hf_checkpoint": "/m", "contract": contract, "host": "127.0.0.1", "api_key": "k", "seed": 3,
        "num_threads": 2, "max_concurrency": 8, "cache_tokens": 100, "trust_remote_code": False,
        "sglang_args": (),
    }  # fmt: skip
    return EngineSpec(**{**values, **changes})


def value_of(flags, name):
    return flags[flags.index(name) + 1]


@pytest.mark.parametrize("contract", [ALIGNED, STOCK, ON_GPU])
def test_the_contract_travels_in_the_environment(contract):
    environment = engine_environment(spec_of(contract))
    assert NumericsContract.from_json(environment[CONTRACT_VARIABLE]) == contract
    assert ("SGLANG_PLATFORM" in environment) == (contract.device == "cpu")


def test_only_an_aligned_engine_runs_deterministically_on_the_hugging_face_model():
    aligned, stock = (engine_flags(spec_of(c), 1) for c in (ALIGNED, STOCK))
    assert "--enable-deterministic-inference" in aligned
    assert value_of(aligned, "--model-impl") == "transformers"
    assert not {"--enable-deterministic-inference", "--model-impl"} & set(stock)


def test_nothing_that_aligned_operators_can_do_is_switched_off():
    assert not {"--disable-radix-cache", "--chunked-prefill-size"} & set(
        engine_flags(spec_of(ALIGNED), 1)
    )


def test_an_engine_on_a_gpu_gets_its_own_and_none_of_the_cpu_flags():
    flags = engine_flags(spec_of(ON_GPU, first_gpu=5), 1)
    assert value_of(flags, "--device") == "cuda"
    assert value_of(flags, "--base-gpu-id") == "5"
    assert not {"torch_native", "--max-total-tokens", "--disable-overlap-schedule"} & set(flags)


def test_the_users_flags_come_last():
    flags = engine_flags(spec_of(ALIGNED, sglang_args=("--max-total-tokens", "7")), 1)
    assert flags[-2:] == ["--max-total-tokens", "7"]
