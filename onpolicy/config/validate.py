"""The rules that a run's values must keep together; those of one value stand beside its field."""

from __future__ import annotations

from collections.abc import Sequence

from onpolicy.config import addresses, corrections, groups, secrets, settings, sglang_flags
from onpolicy.config.aligned import aligning_flag, require_operators
from onpolicy.config.eval_sets import eval_sets
from onpolicy.config.flags import spelled
from onpolicy.config.kinds import SMALLEST_TEMPERATURE
from onpolicy.config.ranges import require_ranges
from onpolicy.config.train import TrainConfig
from onpolicy.config.unread import refuse_unread
from onpolicy.errors import ConfigError
from onpolicy.system.network import is_loopback


def validate(config: TrainConfig) -> None:
    """Raise ConfigError for the first value that breaks a rule."""
    require_ranges(config)
    _require_batch_sizes(config)
    _require_sampling(config)
    _require_companions(config)
    _require_engines(config)
    require_cluster(config.cluster)
    _require_order_of_sums(config)
    corrections.validate(config)
    settings.require_known(config.output.allow_changed_settings, config)
    require_operators(
        config.operators,
        config.sglang_args,
        mode=config.plan.may_align,
        train_backend=config.trainer.train_backend,
    )
    config.count_row_parallel_blocks()
    refuse_unread(config)


def _refuse(flag: str, value: object, rule: str, remedy: str) -> None:
    raise ConfigError(f"{spelled(flag)}={value}: {rule}. {remedy}")


MAX_SAMPLES = 10_000_000
"""Most samples of a rollout: one process holds all of them."""


def _require_batch_sizes(config: TrainConfig) -> None:
    samples, size = config.samples_per_rollout, config.trainer.global_batch_size
    rollout = config.rollout
    if samples > MAX_SAMPLES:
        _refuse(
            "rollout_batch_size",
            rollout.rollout_batch_size,
            f"x n_samples_per_prompt {rollout.n_samples_per_prompt} = {samples} samples, and a rollout, "
            f"which one process holds, may have {MAX_SAMPLES}",
            "Lower one of the two.",
        )
    if size is not None and samples % size:
        _refuse(
            "global_batch_size",
            size,
            f"rollout_batch_size {rollout.rollout_batch_size} x n_samples_per_prompt "
            f"{rollout.n_samples_per_prompt} = {samples} samples must be global_batch_size x a whole "
            "number of optimizer steps",
            f"Divisors of {samples}: {_divisors(samples)}.",
        )
    estimator, n = config.algorithm.advantage_estimator, config.rollout.n_samples_per_prompt
    if estimator not in ("reinforce", "reinforce_plus_plus") and n < 2:
        _refuse(
            "n_samples_per_prompt",
            n,
            f"--advantage-estimator {estimator} compares the samples of a group and needs 2 or more",
            "Raise it, or use --advantage-estimator reinforce.",
        )


def _divisors(n: int) -> str:
    return ", ".join(str(d) for d in range(1, n + 1) if n % d == 0)


def _require_sampling(config: TrainConfig) -> None:
    rollout = config.rollout
    if rollout.rollout_temperature < SMALLEST_TEMPERATURE:
        _refuse(
            "rollout_temperature",
            rollout.rollout_temperature,
            f"must be at least {SMALLEST_TEMPERATURE:g}: SGLang samples greedily below it, and a greedy "
            "rollout has no log-probabilities to learn from",
            "Give 1.0, or another value in that range.",
        )
    neutral = {"rollout_top_p": 1.0, "rollout_top_k": -1, "rollout_min_p": 0.0}
    has_own_sampler = config.plan.may_align or "log_probs" in config.operators.kinds
    flag = aligning_flag(config.operators, mode=config.plan.may_align)
    for name, value in neutral.items():
        if has_own_sampler and getattr(rollout, name) != value:
            _refuse(
                name,
                getattr(rollout, name),
                f"with {flag} a token is sampled from softmax(logits / temperature) and "
                "from nothing else, since a filter makes the sampling distribution another one than "
                "the policy that is trained",
                f"Leave it at {value}, or run without {flag}.",
            )


def _require_companions(config: TrainConfig) -> None:
    for name, path in (
        ("hf_checkpoint", config.model.hf_checkpoint),
        ("prompt_data", config.data.prompt_data),
    ):
        if not path:
            raise ConfigError(f"{spelled(name)} is missing: a run needs it. Give a path.")
    reward = config.reward
    if bool(reward.rm_type) == bool(reward.custom_rm_path):
        raise ConfigError(
            f"--rm-type={reward.rm_type!r}, --custom-rm-path={reward.custom_rm_path!r}: a run needs "
            "exactly one of them. Give --rm-type math, dapo or exact, or a function of your own."
        )
    needs = [
        ("save_interval", config.output.save_interval, "save", config.output.save),
        (
            "eval_interval",
            config.eval.eval_interval,
            "eval_prompt_data",
            " ".join(config.eval.eval_prompt_data),
        ),
    ]
    for name, value, other, given in needs:
        if bool(value) != bool(given):
            raise ConfigError(
                f"{spelled(name)}={value}, {spelled(other)}={given!r}: the one "
                "does nothing without the other. Give both, or neither."
            )
    eval_sets(config.eval.eval_prompt_data)


def _require_engines(config: TrainConfig) -> None:
    engine = config.engine
    require_servers(engine, config.sync.weight_sync, config.sglang_args)
    addresses.validate(engine)
    require_key_for_host(engine.rollout_host, engine.rollout_api_key)
    require_secrets(engine.rollout_api_key, config.sglang_args)


def _require_order_of_sums(config: TrainConfig) -> None:
    megatron = config.megatron
    layout = {"megatron_pp": megatron.megatron_pp, "megatron_ep": megatron.megatron_ep}
    for name, degree in layout.items():
        if config.trainer.rank_invariant and degree > 1:
            _refuse(
                name,
                degree,
                "with --rank-invariant each rank adds the gradients of one micro-batch at a time, of "
                "tokens of its own, and stages of a pipeline or experts on several ranks do not",
                "Leave one of the two out.",
            )


def require_servers(
    servers: groups.ServersConfig, weight_sync: str, sglang_args: Sequence[str]
) -> None:
    """Raise ConfigError if servers are asked for in two ways, or GPUs are shared that cannot be."""
    if servers.rollout_server_url and servers.rollout_num_engines != 1:
        _refuse(
            "rollout_num_engines",
            servers.rollout_num_engines,
            "with --rollout-server-url no server is started",
            "Leave one of the two out.",
        )
    if servers.rollout_server_url and sglang_args:
        _refuse(
            "sglang_*",
            " ".join(secrets.hide(sglang_args)),
            "with --rollout-server-url no server is started, so nothing would read it",
            "Give it to the command that starts the server.",
        )
    if servers.colocate and weight_sync == "distributed":
        _refuse(
            "weight_sync",
            weight_sync,
            "with --colocate a server and the trainer are on one GPU, and a group of NCCL's takes each "
            "GPU once",
            "Choose --weight-sync tensor or ipc.",
        )
    sglang_flags.memory_fraction(sglang_args)


def require_cluster(cluster: groups.ClusterConfig) -> None:
    """Raise ConfigError if ranks are counted twice, or for an address that is none."""
    gpus, ranks = cluster.actor_num_gpus_per_node, cluster.actor_num_ranks_per_node
    if gpus is not None and ranks is not None:
        _refuse(
            "actor_num_ranks_per_node",
            ranks,
            f"with --actor-num-gpus-per-node={gpus} a host has a rank for each of those GPUs",
            "Leave one of the two out.",
        )
    require_ray_address(cluster)


def require_ray_address(cluster: groups.HostsConfig) -> None:
    """Raise ConfigError if the cluster is asked for as Ray's client does."""
    if "://" in cluster.ray_address:
        _refuse(
            "ray_address",
            cluster.ray_address,
            "is no host:port; a run is part of the cluster, and no client of it",
            "Start a node on this host (`ray start --address=HEAD:6379`), and give auto.",
        )


def require_secrets(api_key: str, sglang_args: Sequence[str]) -> None:
    """Raise ConfigError for a secret in a file that cannot be read."""
    secrets.reveal("--rollout-api-key", api_key)
    for flag, value in secrets.split(sglang_args)[1].items():
        secrets.reveal(f"{sglang_flags.PREFIX}{flag[2:]}", value)


def require_key_for_host(host: str, api_key: str) -> None:
    """Raise ConfigError if a server would listen beyond this host without a key of the user's."""
    if not is_loopback(host) and not api_key:
        _refuse(
            "rollout_host",
            host,
            "a server that others can reach needs a key",
            "Add --rollout-api-key, or leave the address at 127.0.0.1.",
        )
