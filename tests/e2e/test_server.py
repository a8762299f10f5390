"""A real server: who may talk to it, what it refuses, and what it refuses to start with."""

import dataclasses
import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import psutil
import pytest
import requests

from onpolicy.config import groups
from onpolicy.contract import CONTRACT_VARIABLE, NumericsContract
from onpolicy.errors import ConfigError, ContractError, EngineError
from onpolicy.rollout.base import SamplingJob
from onpolicy.rollout.client import EngineClient
from onpolicy.rollout.engine_args import engine_environment, engine_flags
from onpolicy.rollout.server import EngineServer, require_free_port
from onpolicy.rollout.sglang import SglangGroup
from onpolicy.run.launch.contracts import contract_for
from onpolicy.system.network import free_port
from onpolicy.system.private_directory import PrivateDirectory
from sglang_patches import shared_names
from tests.support.after_import import after_import
from tests.support.engines_fixture import make_engines, make_requests
from tests.support.processes import engine_processes, listening_addresses
from tests.support.tiny import make_checkpoint
from tests.support.train_runs import wait_for

pytestmark = pytest.mark.engine

ROOT = Path(__file__).parents[2]


@pytest.fixture
def client(engines):
    return engines.rollout.clients[0]


@pytest.fixture
def spec(engines):
    return engines.rollout.servers[0].spec


def test_a_server_has_the_cache_that_was_asked_for_and_says_so(client, spec):
    assert client.report()["cache_tokens"] == spec.cache_tokens > 0


def group_for(engines, contract):
    """A group that connects to the shared server instead of starting one."""
    config = groups.EngineConfig(rollout_server_url=(engines.rollout.clients[0].url,))
    spec = dataclasses.replace(engines.rollout.servers[0].spec, contract=contract)
    return SglangGroup(config, [spec], None)


def test_it_listens_on_loopback_only_and_wants_the_runs_key(engines, client):
    processes = engine_processes(engines.rollout.servers[0])
    assert listening_addresses([*processes.values(), psutil.Process()]) == {"127.0.0.1"}
    for headers in ({}, {"Authorization": "Bearer wrong"}):
        answer = requests.post(f"{client.url}/generate", json={"input_ids": [5]}, headers=headers)
        assert answer.status_code == 401


def test_it_reports_its_contract_self_check_and_patches(engines, client):
    report = client.report()
    assert NumericsContract.from_json(report["contract"]) == engines.contract
    assert report["self_check"] == engines.trainer.self_check
    assert report["tp_size"] == 1
    layers = engines.hf_config.num_hidden_layers
    assert report["fusion"] == {"joint_linears": 2 * layers, "fused_norms": 2 * layers}
    assert {
        "attention backend torch_native",
        "sampler backend pytorch",
        "sglang.srt.entrypoints.engine._set_envs_and_config",
        "sglang.srt.layers.logits_processor.LogitsProcessor._compute_lm_head",
        "sglang.srt.layers.quantization.unquant.UnquantizedLinearMethod.apply",
    } <= set(report["patches"])


def test_a_request_for_another_distribution_is_refused_with_the_reason(client):
    """Clients' of either protocol: test_serve_text.py."""
    body = {"input_ids": [5], "sampling_params": {"frequency_penalty": 0.5}}
    answer = requests.post(f"{client.url}/generate", headers=client.headers, json=body)
    assert answer.status_code == 400
    assert "frequency_penalty=" in answer.text and "true-on-policy mode" in answer.text


def test_a_greedy_request_takes_the_likeliest_token_beside_sampled_ones(engines):
    sampled = make_requests(4, seed=7, max_new_tokens=3)
    greedy = [
        dataclasses.replace(r, params=dataclasses.replace(r.params, temperature=0.0))
        for r in sampled
    ]
    completions = engines.generate([*sampled, *greedy])[4:]
    for request, completion in zip(greedy, completions, strict=True):
        sequences = [[*request.prompt_ids, token] for token in range(137)]
        prompt_lens = [len(request.prompt_ids)] * 137
        scored = [x.item() for x in engines.trainer.log_probs(sequences, prompt_lens, 1.0)]
        assert completion.response_ids[0] == scored.index(max(scored))
        assert completion.rollout_log_probs[0] == max(scored)


def test_requests_that_begin_together_are_one_call(engines):
    log = engines.rollout.servers[0].log_file
    before = log.read_text().count('"POST /generate')
    engines.generate(make_requests(24, seed=11, max_new_tokens=3))
    assert log.read_text().count('"POST /generate') == before + 1


def test_a_stop_token_ends_the_response_and_belongs_to_it(engines):
    request = make_requests(1, seed=8)[0]
    full = engines.generate([request])[0]
    params = dataclasses.replace(
        request.params, stop_token_ids=(full.response_ids[5],), ignore_eos=False
    )
    stopped = engines.generate([dataclasses.replace(request, params=params)])[0]
    end = full.response_ids.index(full.response_ids[5]) + 1
    assert stopped.response_ids == full.response_ids[:end]
    assert stopped.rollout_log_probs == full.rollout_log_probs[:end]
    assert stopped.finish_reason == "stop" and full.finish_reason == "length"


def test_a_run_can_use_a_server_that_is_running_already(engines):
    group = group_for(engines, engines.contract)
    group.connect(engines.trainer.self_check)
    sampled = make_requests(3, seed=9)
    assert [c.response_ids for c in group.generate(SamplingJob(sampled))] == [
        c.response_ids for c in engines.generate(sampled)
    ]


def test_a_server_with_another_contract_is_refused(engines):
    other = dataclasses.replace(engines.contract, dtype="bfloat16")
    with pytest.raises(ContractError, match=f"the trainer's is {other.fingerprint}"):
        group_for(engines, other).connect({})


def test_a_server_whose_operators_give_other_bits_is_refused_by_operator(engines):
    checks = {**engines.trainer.self_check, "linear 137x96": "00000000"}
    with pytest.raises(ContractError, match=r"operators=\['linear 137x96'\] give other bits"):
        group_for(engines, engines.contract).connect(checks)


def test_a_server_that_is_gone_cannot_be_restarted_by_someone_who_did_not_start_it(engines):
    group = group_for(engines, engines.contract)
    group.clients = [EngineClient(f"http://127.0.0.1:{free_port('127.0.0.1')}", "", 5, 60)]
    with pytest.raises(EngineError, match="onpolicy did not start them"):
        group.generate(SamplingJob(make_requests(2, seed=10)))


def test_a_server_has_sampled_a_token_before_it_is_ready_and_frozen_what_that_imported(engines):
    """Else each push would search the objects of those modules for garbage."""
    log = engines.rollout.servers[0].log_file.read_text()
    assert log.index('"POST /generate HTTP') < log.rindex('"POST /freeze_gc HTTP')
    assert '"GET /health' not in log.split('"POST /freeze_gc HTTP')[1]  # it sleeps for a second


def test_a_port_in_use_is_refused(engines):
    port = engines.rollout.servers[0].port
    with pytest.raises(ConfigError, match=f"port {port} on 127.0.0.1 cannot be used"):
        require_free_port("127.0.0.1", port)


def end_of_start(spec, directory, meanwhile=lambda server: None):
    """What is said of a server that does not come up."""
    server = EngineServer(spec, 0, directory / "engine.log")
    server.start()
    try:
        meanwhile(server)
        with pytest.raises(EngineError) as raised:
            server.wait_until_healthy(200)
    finally:
        server.stop()
    return str(raised.value)


def test_an_unknown_sglang_flag_names_the_nearest(spec, tmp_path):
    spec = dataclasses.replace(spec, sglang_args=("--chunked-prefil-size", "48"))
    assert "Did you mean --sglang-chunked-prefill-size" in end_of_start(spec, tmp_path)


def test_a_server_that_is_killed_while_it_starts_ends_with_who_can_have_done_it(spec, tmp_path):
    def kill(server):
        guard = psutil.Process(server._process.pid)
        wait_for(guard.children)
        guard.children()[0].kill()

    said = end_of_start(spec, tmp_path, kill)
    assert "before it was ready: it was ended by SIGKILL: a process" in said


DEATHS = {
    "a module that is not there": (
        "import sys; sys.modules['sglang.srt.model_executor.model_runner'] = None",
        r"could not apply them \(ModuleNotFoundError: .*model_runner.*\).*Install .* what it needs",
    ),
    "too little memory": (
        after_import(
            "sglang.srt.model_executor.model_runner",
            "import torch\n"
            "from sglang.srt.model_executor.model_runner import ModelRunner\n"
            "ModelRunner.load_model = lambda _: torch.empty(1 << 60, dtype=torch.uint8)",
        ),
        r"ran out of memory \(.*Give --sglang-max-total-tokens for a smaller",
    ),
}


@pytest.mark.parametrize("name", DEATHS)
def test_the_first_line_of_a_server_that_dies_says_of_what_and_what_to_try(
    name, spec, tmp_path, monkeypatch
):
    code, message = DEATHS[name]
    (tmp_path / "sitecustomize.py").write_text(code)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{ROOT}")
    assert re.search(message, end_of_start(spec, tmp_path).partition("\n")[0])


SABOTAGE = {
    "a hook that SGLang cannot apply": (
        "import sglang_patches.engine_linears as linear; linear.TARGET = 'sglang.srt.no_such.thing'",
        r"missing patches=\['sglang.srt.no_such.thing'\]: .* \(ModuleNotFoundError: .*no_such'\)",
    ),
    "a plug-in that fails": (
        "import sglang_patches.engine_sampler as sampler; sampler.install = None",
        "the onpolicy plug-in did not run",
    ),
    "an operator that is not row-invariant": (
        """
        import onpolicy.ops.cpu as cpu
        from tests.support.violations import few, next_up

        right = cpu.tiled_linear

        def broken(pool, x, *rest):
            out = right(pool, x, *rest)
            return next_up(out) if few(len(x)) else out

        cpu.tiled_linear = broken
        """,
        "operator=linear, shape=",
    ),
}


@pytest.mark.parametrize("name", SABOTAGE)
def test_it_refuses_to_serve_with(name, spec, tmp_path):
    """Started by a script, so that the children that SGLang spawns are sabotaged too."""
    sabotage, message = SABOTAGE[name]
    script = tmp_path / "serve.py"
    script.write_text(
        "from tests.support import sglang_ahead\nsglang_ahead.bring_back()\n"
        + textwrap.dedent(sabotage)
        + "\nimport sys\nfrom sglang_patches.server_process import main\n"
        + "if __name__ == '__main__':\n    main(sys.argv[1:])\n"
    )
    command = [sys.executable, str(script), *engine_flags(spec, free_port("127.0.0.1"))]
    environment = {**os.environ, **engine_environment(spec), "PYTHONPATH": str(ROOT)}
    with PrivateDirectory(shared_names.PATTERNS) as directory:  # no guard removes what it leaves
        done = subprocess.run(
            command,
            env={**environment, shared_names.DIRECTORY_VARIABLE: str(directory.path)},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=200,
        )
    assert done.returncode != 0
    assert re.search(message, done.stderr + done.stdout)


def test_a_stock_engine_whose_tied_output_projection_nothing_fills_is_refused(tmp_path):
    """SGLang's own Qwen3MoeForCausalLM would sample noise."""
    checkpoint = make_checkpoint(tmp_path / "model", "qwen3-moe", tie_word_embeddings=True)
    pair = make_engines(checkpoint, tmp_path)
    contract = contract_for(pair.config, pair.hf_config, aligned=False)
    spec = dataclasses.replace(pair.rollout.servers[0].spec, contract=contract)
    said = end_of_start(spec, tmp_path)
    assert re.search(r"tie_word_embeddings=True: .*Qwen3Moe.* not tied", said)


def test_without_a_contract_the_plugin_changes_nothing(monkeypatch):
    from sglang_patches import platform, plugin, registry

    monkeypatch.delenv(CONTRACT_VARIABLE, raising=False)
    monkeypatch.delenv("SGLANG_PLATFORM", raising=False)
    plugin.load()
    assert registry._requested == registry._installed == []
    assert platform.activate() is None
