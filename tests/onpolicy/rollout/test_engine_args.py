"""A contract as SGLang's flags and environment."""

import dataclasses

import pytest

from onpolicy.contract import (
    CONTRACT_VARIABLE,
    DIGESTS_VARIABLE,
    VARIABLES,
    DeltaShape,
    NumericsContract,
    OperatorShapes,
)
from onpolicy.errors import ConfigError
from onpolicy.rollout.engine_args import (
    CORES_VARIABLE,
    EngineSpec,
    engine_environment,
    engine_flags,
    secret_flags,
)
from onpolicy.rollout.server import environment_of
from onpolicy.system.network import GLOO_INTERFACE

SHAPES = OperatorShapes(linear=(), attention=(), norm=(), vocab_size=1)
ALIGNED = NumericsContract(backend="cpu", device="cpu", dtype="float32", shapes=SHAPES)
STOCK = dataclasses.replace(ALIGNED, backend="stock")
ON_GPU = dataclasses.replace(STOCK, device="cuda")
DELTA = DeltaShape(key_heads=1, value_heads=2, key_dim=8, value_dim=8, kernel_size=4)
RECURRENT = dataclasses.replace(ALIGNED, shapes=dataclasses.replace(SHAPES, delta=(DELTA,)))


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


def test_an_engine_digests_rows_if_it_is_to_whatever_our_own_environment_says():
    assert engine_environment(spec_of(ALIGNED, digests_rows=True))[DIGESTS_VARIABLE]
    assert engine_environment(spec_of(ALIGNED))[DIGESTS_VARIABLE] == ""


@pytest.mark.parametrize("backend", VARIABLES)
def test_an_engine_starts_under_the_variables_of_its_operators(backend, monkeypatch):
    asked = VARIABLES[backend]
    for name in asked:
        monkeypatch.setenv(name, "another")
    environment = environment_of(spec_of(dataclasses.replace(ALIGNED, backend=backend)))
    assert environment.items() >= asked.items()
    assert not engine_environment(spec_of(ALIGNED)).keys() & asked.keys()


def test_only_an_aligned_engine_runs_deterministically_on_the_hugging_face_model():
    aligned, stock = (engine_flags(spec_of(c), 1) for c in (ALIGNED, STOCK))
    assert "--enable-deterministic-inference" in aligned
    assert value_of(aligned, "--model-impl") == "transformers"
    assert not {"--enable-deterministic-inference", "--model-impl"} & set(stock)


def test_nothing_that_aligned_operators_can_do_is_switched_off():
    assert not {"--disable-radix-cache", "--chunked-prefill-size"} & set(
        engine_flags(spec_of(ALIGNED), 1)
    )


def test_a_prompt_in_chunks_takes_two_places_and_leaves_room_for_the_others():
    assert value_of(engine_flags(spec_of(STOCK), 1), "--max-running-requests") == "9"


def test_an_engine_on_a_gpu_gets_its_own_and_none_of_the_cpu_flags():
    flags = engine_flags(spec_of(ON_GPU, first_gpu=5), 1)
    assert value_of(flags, "--device") == "cuda"
    assert value_of(flags, "--base-gpu-id") == "5"
    assert not {"torch_native", "--max-total-tokens", "--disable-overlap-schedule"} & set(flags)


@pytest.mark.parametrize("backend", ["triton", "hopper", "cublaslt"])
def test_an_aligned_engine_on_a_gpu_attends_through_sglangs_fa3_backend(backend):
    flags = engine_flags(spec_of(dataclasses.replace(ON_GPU, backend=backend)), 1)
    values = {"--attention-backend": "fa3", "--page-size": "1", "--sampling-backend": "pytorch"}
    assert {name: value_of(flags, name) for name in values} == values
    assert "--enable-deterministic-inference" in flags
    assert not any("graph" in flag or "radix" in flag for flag in flags)


def test_an_engine_on_a_gpu_with_recurrent_layers_has_no_graphs_and_no_pass_after_a_requests_end():
    on_gpu = dataclasses.replace(RECURRENT, device="cuda", backend="triton")
    wanted = {"--disable-overlap-schedule", "--disable-cuda-graph"}
    assert wanted <= set(engine_flags(spec_of(on_gpu), 1))
    for stock in (ON_GPU, dataclasses.replace(on_gpu, backend="stock")):
        assert not wanted & set(engine_flags(spec_of(stock), 1))


def test_an_engine_on_a_cpu_has_as_many_states_as_it_was_given():
    assert (
        value_of(engine_flags(spec_of(RECURRENT, state_slots=12), 1), "--max-mamba-cache-size")
        == "12"
    )
    assert "--max-mamba-cache-size" not in engine_flags(spec_of(ALIGNED), 1)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_every_flag_is_one_that_the_installed_sglang_has(device):
    import argparse

    server_args = pytest.importorskip("sglang.srt.server_args")
    parser = argparse.ArgumentParser(allow_abbrev=False)
    server_args.ServerArgs.add_cli_args(parser)
    backend = {"cpu": "cpu", "cuda": "hopper"}[device]
    contract = dataclasses.replace(RECURRENT, device=device, backend=backend, dtype="bfloat16")
    parsed, unknown = parser.parse_known_args(engine_flags(spec_of(contract, state_slots=3), 1))
    assert not unknown
    assert parsed.enable_deterministic_inference


def test_the_users_flags_come_last():
    flags = engine_flags(spec_of(ALIGNED, sglang_args=("--max-total-tokens", "7")), 1)
    assert flags[-2:] == ["--max-total-tokens", "7"]


def test_secrets_are_on_no_command_line():
    spec = spec_of(ALIGNED, api_key="K", sglang_args=("--admin-api-key", "A", "--tp-size", "1"))
    assert not {"--api-key", "--admin-api-key", "K", "A"} & set(engine_flags(spec, 1))
    assert secret_flags(spec) == ["--api-key=K", "--admin-api-key=A"]


@pytest.mark.parametrize(
    ("host", "given", "interface"),
    [
        ("127.0.0.1", None, "lo"),
        ("127.0.0.1", "eth7", "eth7"),
        ("0.0.0.0", None, ""),
        ("0.0.0.0", "lo", ""),  # the trainer's own choice for itself
        ("0.0.0.0", "eth7", "eth7"),
    ],
)
def test_gloo_listens_on_this_host_alone_unless_the_server_does_not(
    monkeypatch, host, given, interface
):
    monkeypatch.delenv(GLOO_INTERFACE, raising=False)
    if given is not None:
        monkeypatch.setenv(GLOO_INTERFACE, given)
    assert engine_environment(spec_of(ALIGNED, host=host))[GLOO_INTERFACE] == interface


def bound_cores(monkeypatch, cores, tp_size):
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(cores))
    spec = spec_of(ALIGNED, sglang_args=("--tp-size", str(tp_size)))
    return engine_environment(spec).get(CORES_VARIABLE)


@pytest.mark.parametrize(
    ("cores", "tp_size", "bound"),
    [
        (range(8), 1, None), (range(8), 2, "0,1,2,3|4,5,6,7"), ((3, 5, 7), 2, "3|5"),
        ((0, 1), 4, "0|1|0|1"), ((6,), 2, "6|6"),
    ],
)  # fmt: skip
def test_tensor_parallel_ranks_share_the_cores(monkeypatch, cores, tp_size, bound):
    monkeypatch.delenv(CORES_VARIABLE, raising=False)
    assert bound_cores(monkeypatch, cores, tp_size) == bound


def test_cores_that_the_user_bound_stay_bound(monkeypatch):
    monkeypatch.setenv(CORES_VARIABLE, "0|0")
    assert bound_cores(monkeypatch, range(8), 2) is None


def test_only_a_server_of_text_reads_a_tokenizer_and_none_of_the_checkpoints_filters():
    text, tokens = (engine_flags(spec_of(ALIGNED, serves_text=x), 1) for x in (True, False))
    assert value_of(text, "--sampling-defaults") == "openai"
    assert "--skip-tokenizer-init" in set(tokens) - set(text)


def test_no_chunk_ends_within_an_image_whose_tokens_see_each_other():
    contract = dataclasses.replace(ALIGNED, images="gemma3")
    assert value_of(engine_flags(spec_of(contract), 1), "--chunked-prefill-size") == "-1"
    assert "--chunked-prefill-size" not in engine_flags(
        spec_of(dataclasses.replace(ALIGNED, images="qwen3_vl")), 30000
    )
    with pytest.raises(ConfigError, match=r"--sglang-chunked-prefill-size=64.*within an image"):
        engine_flags(spec_of(contract, sglang_args=("--chunked-prefill-size", "64")), 30000)
