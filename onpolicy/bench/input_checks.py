"""Check that a benchmark can run, before it starts anything."""

from __future__ import annotations

from onpolicy.bench.cells import UNLIMITED, fit_decode, require_cells
from onpolicy.bench.schedules import schedules
from onpolicy.bench.setting import backends, kinds, make_train_config, setting
from onpolicy.bench.work import fit_bench
from onpolicy.config.tool_flags import BenchConfig
from onpolicy.errors import ConfigError
from onpolicy.models.hf_config import load_config
from onpolicy.models.size import ModelSize
from onpolicy.models.weight_files import require_fit
from onpolicy.rollout.engine_args import CONTEXT_MARGIN, FlagCheck, require_cache
from onpolicy.run.launch.engine_specs import rollout_spec
from onpolicy.run.launch.input_checks import check_layout
from onpolicy.run.launch.memory import ProcessMemory, RunMemory, require_memory


def check_inputs(config: BenchConfig) -> BenchConfig:
    """Return the configuration to measure. Raises ConfigError for inputs that an engine could not
    run."""
    hf_config = load_config(config.model.hf_checkpoint)
    fit = fit_decode if config.what == "decode" else fit_bench
    config = fit(config, hf_config)
    name, sampled = "--max-new-tokens", config.max_new_tokens
    if config.longest_response is not None:
        name, sampled = "--longest-response", config.longest_response
    length, context = config.prompt_len + sampled, hf_config.max_position_embeddings
    if length + CONTEXT_MARGIN > context:
        raise ConfigError(
            f"{name}={sampled}: with --prompt-len {config.prompt_len} and "
            f"{CONTEXT_MARGIN} tokens that SGLang keeps free it does not fit the model's context of "
            f"{context}. Lower one of the two."
        )
    if config.what == "step" and (not config.num_tokens or min(config.num_tokens) < length):
        raise ConfigError(
            f"--num-tokens={' '.join(map(str, config.num_tokens))}: a sequence has --prompt-len + "
            f"--max-new-tokens = {length} tokens, and at least one must fit. Give larger numbers."
        )
    if config.what == "agents" and config.max_new_tokens < config.num_turns:
        raise ConfigError(
            f"--max-new-tokens={config.max_new_tokens}, --num-turns={config.num_turns}: a turn has at "
            "least one token. Give fewer turns, or more tokens."
        )
    if config.what == "loop" and config.n_samples_per_prompt < 2:
        raise ConfigError(
            f"--n-samples-per-prompt={config.n_samples_per_prompt}: an advantage is what a response is "
            "better than others to its prompt, so a step takes at least 2. Give more."
        )
    if config.what == "loop" and len(backends(config)) > 1:
        raise ConfigError(
            f"--train-backend={config.train_backend}: a step is of one engine. Give fsdp or megatron."
        )
    for backend in backends(config):
        check_layout(make_train_config(config, "aligned", backend))
    train_config, contract = setting(config, hf_config, "aligned", backends(config)[0])
    spec = rollout_spec(train_config, hf_config, contract, length)
    with FlagCheck(spec) as flags:
        require_fit(config.model.hf_checkpoint, hf_config)
        if config.what != "step":
            require_cache(spec)
        if config.what == "decode":
            context = hf_config.max_position_embeddings
            require_cells(config, context, spec.cache_tokens or UNLIMITED)
        ranks = 0 if config.what in ("rollout", "decode", "agents") else config.cluster.num_ranks
        servers = 0 if config.what == "step" else config.engines.rollout_num_engines
        size = ModelSize.of(hf_config)
        memory = RunMemory(train_config, hf_config, spec, size)
        held = processes(config, memory, ranks, servers)
        require_memory(held, contract.device, ray_address=config.cluster.ray_address)
        flags.require_passed()
    return config


def num_measured(config: BenchConfig, device: str) -> int:
    """Return the number of things measured side by side: kinds of operators, training engines, or
    schedules."""
    if config.longest_response is not None:
        return len(schedules(config))
    return len(kinds(config, device))


def processes(
    config: BenchConfig, memory: RunMemory, ranks: int, servers: int
) -> list[ProcessMemory]:
    """Return the memory of the processes of all measured things, which run at the same time."""
    count = num_measured(config, memory.spec.contract.device)
    return memory.sides(count * ranks, count * servers)
