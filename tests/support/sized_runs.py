"""Runs of few tokens, and what an engine is asked for in them: for sums of memory."""

from dataclasses import replace

from onpolicy.config import TrainConfig, groups
from onpolicy.models.hf_config import load_config
from onpolicy.models.size import ModelSize
from onpolicy.run.launch.contracts import contract_for
from onpolicy.run.launch.engine_specs import rollout_spec
from onpolicy.run.launch.memory import RunMemory
from tests.support.unstarted_run import changed


def make_config(path, dtype="float32", checkpointing=False, **engine):
    return changed(
        TrainConfig(), hf_checkpoint=str(path), dtype=dtype, num_rollout=1, rollout_batch_size=2,
        n_samples_per_prompt=2, cpu_threads=1, max_tokens_per_gpu=200,
        activation_checkpointing=checkpointing, true_on_policy_mode=True, **engine,
    )  # fmt: skip


def make_spec(config, longest=50):
    hf_config = load_config(config.model.hf_checkpoint)
    contract = contract_for(config, hf_config, aligned=True)
    return hf_config, rollout_spec(config, hf_config, contract, longest)


def run_on_gpus(path, colocate=True, ranks=1, gpu_bytes=80 << 30, sglang_args=(), parameters=0):
    """What a run takes on GPUs of so many bytes; of a model of so many parameters, if they are given."""
    config = make_config(path, "bfloat16", checkpointing=True)
    hf_config, spec = make_spec(config)
    config = replace(
        config,
        engine=replace(config.engine, colocate=colocate),
        cluster=groups.ClusterConfig(actor_num_ranks_per_node=ranks),
    )
    contract = replace(spec.contract, device="cuda")
    spec = replace(spec, contract=contract, cache_tokens=0, sglang_args=sglang_args)
    size = ModelSize.of(hf_config)
    if parameters:
        layer = parameters // size.layers
        size = replace(size, parameters=parameters, trained=parameters, largest_layer=layer)
    run = RunMemory(config, hf_config, spec, size)
    return replace(run, spec=replace(spec, memory_fraction=run.fraction(gpu_bytes)))
