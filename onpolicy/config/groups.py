"""The flags of `onpolicy train`, in groups, some of which other commands share (see `tools`).

A field's name is the flag's. Imports no torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

LossAggregation = Literal[
    "token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm"
]


TrainBackend = Literal["fsdp", "megatron"]


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    hf_checkpoint: str = ""
    """Local directory with the Hugging Face checkpoint. Required."""

    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """Compute dtype of both engines. Master weights and gradient sums are float32 in any case."""


@dataclass(frozen=True, kw_only=True)
class ModelConfig(CheckpointConfig):
    trust_remote_code: bool = False
    """Run Python code that comes with the checkpoint."""


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    prompt_data: str = ""
    """Training prompts: a .jsonl or .parquet file. Required."""

    input_key: str = "prompt"
    """Field with the prompt: a string, or a list of chat messages."""

    label_key: str = "label"
    """Field with the reference answer; dots reach into objects, as in reward_model.ground_truth."""

    apply_chat_template: bool = False
    """Turn prompts into chats with the tokenizer's template."""

    shuffle: bool = True
    """Visit the prompts in a new order in every epoch, fixed by --seed."""


@dataclass(frozen=True, kw_only=True)
class RolloutConfig:
    num_rollout: int = 100
    """Number of rollouts, each followed by training on it."""

    rollout_batch_size: int = 32
    """Prompts per rollout."""

    n_samples_per_prompt: int = 8
    """Responses sampled for every prompt; they form one group."""

    rollout_max_response_len: int = 1024
    """Longest response, in tokens."""

    rollout_temperature: float = 1.0
    """Divides the logits before sampling, and before log-probabilities are taken on both sides."""

    rollout_top_p: float = 1.0
    """Nucleus sampling; only without --true-on-policy-mode."""

    rollout_top_k: int = -1
    """Sample from the k likeliest tokens; only without --true-on-policy-mode."""

    rollout_min_p: float = 0.0
    """Drop tokens less likely than this share of the likeliest; not with --true-on-policy-mode."""

    rollout_stop_token_ids: tuple[int, ...] = ()
    """Tokens that end a response, besides the checkpoint's end-of-sequence tokens."""


@dataclass(frozen=True, kw_only=True)
class CpuConfig:
    cpu_threads: int = 0
    """Threads for CPU operators of each process; 0 shares the cores. Changes no result."""


@dataclass(frozen=True, kw_only=True)
class ServerConfig(CpuConfig):
    rollout_host: str = "127.0.0.1"
    """Address that servers listen on. Another than loopback needs --rollout-api-key."""

    rollout_base_port: int = 0
    """Port of the first server; 0 takes free ones."""

    rollout_api_key: str = ""
    """API key of the servers, or @ and a file that holds it; one is made up for servers that are
    started without. Command lines can be read by everyone on the host, files need not."""


@dataclass(frozen=True, kw_only=True)
class EngineConfig(ServerConfig):
    rollout_num_engines: int = 1
    """SGLang servers to start on this host."""

    rollout_server_url: tuple[str, ...] = ()
    """Use these running servers (started with `onpolicy serve`) instead of starting any."""

    rollout_max_concurrency: int = 256
    """Requests in flight per server."""

    rollout_request_timeout: float = 1800.0
    """Seconds after which a request counts as lost."""

    rollout_start_timeout: float = 600.0
    """Seconds a server may take to start."""

    rollout_health_timeout: float = 60.0
    """Seconds without a successful health check after which a server counts as dead; also what a call
    other than for samples may take, besides a second for every 100 MiB of weights."""

    rollout_max_restarts: int = 3
    """How often dead servers are started again before the run gives up, in all."""

    rollout_weight_format: Literal["", "bf16", "fp8_e4m3", "int8"] = ""
    """Round the weights of linear layers when they are pushed to the servers, as such a deployment
    would have them; not under aligned operators."""


@dataclass(frozen=True, kw_only=True)
class RewardConfig:
    rm_type: Literal["", "math", "dapo", "exact"] = ""
    """Rule that scores a response: math (math-verify), dapo ("Answer: ..."), exact."""

    custom_rm_path: str = ""
    """Own rule instead: package.module.function or path/to/file.py:function, which takes a Sample and
    returns a number, or a dict with one under "score" (docs/rewards.md)."""

    rm_time_limit: float = 10.0
    """Seconds for scoring one response; after that its reward is 0 and the timeout is counted."""

    rm_workers: int = 0
    """Processes that score; 0: one per core, at least 4 and at most 32. Changes no reward."""

    rm_max_error_rate: float = 0.01
    """Share of the samples scored at once that the rule may fail on. They get the reward 0 and are
    counted; beyond this share the run ends. 0: at the first."""


@dataclass(frozen=True, kw_only=True)
class AlgorithmConfig:
    advantage_estimator: Literal[
        "grpo",
        "dr_grpo",
        "rloo",
        "reinforce",
        "reinforce_plus_plus",
        "reinforce_plus_plus_baseline",
    ] = "grpo"
    """How the rewards of a prompt's samples become advantages."""

    policy_loss: Literal["ppo", "gspo", "cispo", "reinforce"] = "ppo"
    """Objective: the clipped ratio of tokens or of sequences, clipped weights, or no ratio."""

    eps_clip: float = 0.2
    """Lower clip of the PPO ratio: 1 - eps_clip."""

    eps_clip_high: float | None = None
    """Upper clip of the PPO ratio: 1 + eps_clip_high; the same as --eps-clip if not given."""

    eps_clip_c: float | None = None
    """Dual clip: with a negative advantage the loss is at most -c times it. Greater than 1."""

    use_opsm: bool = False
    """Drop tokens of negative advantage in sequences that drifted from the rollout's policy."""

    opsm_delta: float = 1e-4
    """Largest mean log-ratio, rollout over current, of a sequence that is kept."""

    loss_aggregation: LossAggregation | None = None
    """Mean over all tokens of the global batch, or over its sequences of their token means or sums
    (-norm: over --rollout-max-response-len). Default: token-mean, but seq-mean-token-mean for gspo."""

    filter_equal_rewards: bool = False
    """Leave out groups whose rewards are all equal: they carry no signal."""

    use_kl_loss: bool = False
    """Add a KL penalty towards the reference model to the loss."""

    kl_loss_coef: float = 0.001
    """Weight of that penalty."""

    kl_loss_type: Literal["k1", "k2", "k3", "low_var_kl"] = "low_var_kl"
    """Estimator of that penalty (http://joschu.net/blog/kl-approx.html); low_var_kl is k3 cut at 10
    nats, since the gradient of k3 grows exponentially."""

    use_unbiased_kl: bool = False
    """Multiply that estimate by the ratio to the rollout's policy, which makes its gradient unbiased."""

    ref_checkpoint: str = ""
    """Checkpoint of the reference model; --hf-checkpoint if not given."""


@dataclass(frozen=True, kw_only=True)
class FallbackConfig:
    use_tis: bool = False
    """Correct an unaligned rollout: weight tokens by the importance ratio pi_train / pi_rollout."""

    use_rs: bool = False
    """Reject tokens or sequences whose ratio is out of bounds."""

    tis_level: Literal["token", "sequence", "geometric"] = "token"
    """Ratio of a token, product over its sequence, or geometric mean over it."""

    rs_level: Literal["token", "sequence", "geometric"] = "token"
    """The same for rejection."""

    tis_mode: Literal["truncate", "clip", "mask"] = "truncate"
    """Cut weights at the upper bound, at both bounds, or leave out what lies outside."""

    tis_lower_bound: float | None = None
    """clip: 1 / --tis-upper-bound if not given; mask: none if not given."""

    tis_upper_bound: float = 2.0
    """Largest weight. All bounds bound the ratio pi_train / pi_rollout."""

    rs_statistic: Literal["ratio", "k2", "k3"] = "ratio"
    """What the bounds of rejection bound: the ratio, or with --rs-upper-bound alone a divergence, k2 or
    k3: of a token, its sum over a sequence, or (geometric) its mean."""

    rs_lower_bound: float | None = None
    """--tis-lower-bound if not given, or 1 / --tis-upper-bound."""

    rs_upper_bound: float | None = None
    """--tis-upper-bound if not given."""

    rs_veto_threshold: float | None = None
    """Reject a whole sequence for one token below it."""

    rs_veto_by: Literal["ratio", "rollout_probability"] = "ratio"
    """What of that token: its ratio, or the probability that the rollout gave it."""

    tis_batch_normalize: bool = False
    """Divide the weights by the mean, over the global batch, of those that are not rejected."""

    rejected_in_denominator: bool = True
    """Count rejected tokens in the denominators of the loss."""

    rejected_in_kl: bool = False
    """Let rejected tokens keep their KL penalty."""

    tis_log_ratio_clamp: float | None = 20.0
    """Log-ratios are cut to +- this before exp."""

    tis_nonfinite: Literal["error", "reject"] = "error"
    """What to do with log-probabilities that are NaN or infinite."""

    custom_tis_function_path: str = ""
    """Own correction instead: package.module.function or path/to/file.py:function, with the arguments
    that Miles gives it; the flags above are handed to it and do nothing else."""

    use_rollout_logprobs: bool = False
    """Bypass: the rollout's log-probabilities are the old policy's; the trainer computes none before
    the loss. Its ratio corrects the rollout; reinforce has none and needs --use-tis."""

    use_rollout_routing_replay: bool = False
    """Mixture of experts: train every token with the experts that the rollout chose for it, at gate
    values of the trainer's own router."""

    get_mismatch_metrics: bool = False
    """Log mismatch/* and estimator/* even if nothing is corrected."""

    dc_mode: Literal["", "fixed", "margin", "lagrangian"] = ""
    """Subtract lambda times the discrepancy between the engines from every token's advantage."""

    dc_measure: Literal["difference", "ratio", "log"] = "difference"
    """|pi_train - pi_rollout|, |rho - 1|, or |log rho|."""

    dc_lambda: float = 0.1
    """The first lambda; 0.05 is the paper's for a mixture of experts."""

    dc_eta: float = 1.0
    """lagrangian: step size of lambda."""

    dc_budget: float = 0.0037
    """lagrangian: mean discrepancy that is allowed; 0.0050 is the paper's for a mixture of experts."""

    dc_lambda_min: float = 0.0
    """lagrangian: smallest lambda."""

    dc_lambda_max: float = 1.0
    """lagrangian: largest lambda."""

    dc_margin: float = 0.0
    """margin: discrepancies up to this cost nothing."""

    dc_average: Literal["trajectory", "token"] = "trajectory"
    """lagrangian: mean over trajectories of their means, or over all tokens."""


@dataclass(frozen=True, kw_only=True)
class TrainerConfig:
    train_backend: TrainBackend = "fsdp"
    """Training engine: PyTorch's FSDP2, or Megatron-core with the --megatron-* flags."""

    global_batch_size: int | None = None
    """Samples per optimizer step; all samples of a rollout if not given."""

    max_tokens_per_gpu: int = 8192
    """Tokens that one rank packs into a micro-batch; a longer sequence gets one of its own."""

    activation_checkpointing: bool = False
    """Compute activations again in the backward pass instead of keeping them."""

    lr: float = 1e-6
    """Peak learning rate of AdamW."""

    lr_warmup_steps: int = 0
    """Optimizer steps of linear warm-up."""

    lr_decay_style: Literal["constant", "linear", "cosine"] = "constant"
    """Shape of the learning rate after the warm-up, down to 0 at the end of the run."""

    lr_schedule: Literal["", "length-decay"] = ""
    """length-decay: also halve the rate in periods that the surge of response length sets."""

    length_decay_period: int | None = None
    """Rollouts between two halvings; 1.8 times the step of the length surge if not given."""

    length_decay_default_period: int = 160
    """The same if no surge was seen in as many rollouts; 0: no halving without a surge."""

    length_decay_floor: float = 0.1
    """Smallest share of the rate that is left."""

    length_decay_burn_in: int = 10
    """A rise of the length that begins in these rollouts is no surge."""

    length_decay_rise_ratio: float = 2.0
    """Rise of the mean response length, over its baseline, that is a surge."""

    weight_decay: float = 0.1
    adam_beta1: float = 0.9
    adam_beta2: float = 0.95
    adam_eps: float = 1e-8

    clip_grad: float = 1.0
    """Largest norm of the gradient; 0 does not clip."""


@dataclass(frozen=True, kw_only=True)
class MegatronConfig:
    megatron_tp: int = 1
    """Tensor-parallel ranks."""

    megatron_sequence_parallel: bool = False
    """Tensor-parallel ranks also share the tokens between their layers."""

    megatron_pp: int = 1
    """Pipeline stages."""

    megatron_cp: int = 1
    """Context-parallel ranks: each computes two stretches of every sequence."""

    megatron_ep: int = 1
    """Expert-parallel ranks; taken from the data-parallel ones."""

    megatron_moe_dispatcher: Literal["allgather", "alltoall"] = "alltoall"
    """How tokens come to the ranks of their experts."""

    megatron_distributed_optimizer: bool = True
    """Data-parallel ranks share the optimizer's state."""


@dataclass(frozen=True, kw_only=True)
class ParityConfig:
    true_on_policy_mode: bool = False
    """Run both engines on aligned operators and check that every log-probability agrees bitwise."""

    parity_policy: Literal["fail", "warn", "fallback"] | None = None
    """On a mismatch: stop before the backward pass, log it, or train on the rollout with the
    correction that the other flags ask for. Default: fail in the mode above, else warn."""


@dataclass(frozen=True, kw_only=True)
class OperatorsConfig:
    row_parallel_blocks: int = 0
    """Blocks into which aligned layers that tensor parallelism shares out cut their sums: a power of
    two. Runs with the same number have the same bits at any degree up to it. 0: the largest degree."""

    operators: Literal["auto", "triton", "hopper"] = "auto"
    """Aligned operators on a GPU: hopper (FlashAttention-3 and DeepGEMM; H100 and H200, bfloat16), or
    triton (A100 to H200, also float32). auto: hopper where it can, else triton; see the log."""


@dataclass(frozen=True, kw_only=True)
class GovernorFlags:
    mismatch_governor: bool = False
    """Let the distance between the engines choose the cure, rollout by rollout: stock operators,
    --use-tis, --use-rs too, a smaller learning rate, aligned operators."""

    governor_k3: float = 1e-3
    """Largest mismatch/k3 before it climbs."""

    governor_ess: float = 0.95
    """Smallest mismatch/ess."""

    governor_log_ppl_abs_diff: float = 0.01
    """Largest mismatch/log_ppl_abs_diff."""

    governor_rise_after: int = 2
    """Consecutive rollouts beyond a limit before it climbs."""

    governor_fall_after: int = 10
    """Consecutive calm rollouts before it climbs down; twice as many after every fall."""

    governor_calm: float = 0.5
    """Share of the limits below which a rollout is calm."""

    governor_lr_scale: float = 0.5
    """Factor of the learning rate on the rung `decay`."""

    governor_highest: Literal["tis", "mis", "decay", "aligned"] = "aligned"
    """Last rung of the ladder."""


@dataclass(frozen=True, kw_only=True)
class WeightSyncConfig:
    weight_sync: Literal["tensor", "distributed", "disk"] = "tensor"
    """Way of new weights to the servers: shared memory, torch.distributed, or safetensors files."""

    update_weight_buffer_size: int = 512
    """MiB of weights gathered and sent at a time."""


@dataclass(frozen=True, kw_only=True)
class EvalConfig:
    eval_interval: int = 0
    """Evaluate before the first and after every so many rollouts; 0: never."""

    eval_prompt_data: tuple[str, ...] = ()
    """Evaluation prompts, read like --prompt-data: a path, or several sets as name path name path."""

    n_samples_per_eval_prompt: int = 1
    """Responses per evaluation prompt: avg@k and pass@k."""

    eval_temperature: float = 1.0
    """Temperature of evaluation samples; 0 is greedy."""

    eval_max_response_len: int | None = None
    """Longest evaluation response; --rollout-max-response-len if not given."""


@dataclass(frozen=True, kw_only=True)
class OutputConfig:
    run_dir: str = "runs/train"
    """Directory for configuration, logs, metrics, plots; made if it is not there."""

    save: str = ""
    """Directory for checkpoints."""

    save_interval: int = 0
    """Save after every so many rollouts, and after the last; 0: never."""

    keep_checkpoints: int = 0
    """Keep the newest so many, deleting an older one when a new one is complete; 0: all."""

    load: str = ""
    """Resume from this directory of checkpoints, at its latest one, or from this checkpoint. The
    same directory as --save may be empty yet: a run that is started again goes on."""

    allow_changed_settings: tuple[str, ...] = ()
    """Settings, by their names in config.json, that may be others than the resumed checkpoint's."""

    use_tensorboard: bool = False
    """Also write TensorBoard files into the run directory."""

    use_wandb: bool = False
    """Also log to Weights & Biases (set WANDB_MODE=offline for no network)."""

    wandb_project: str = "onpolicy"
    """Project name there."""

    wandb_group: str = ""
    """Group of the run there."""

    wandb_run_name: str = ""
    """Name of the run there; one is made up if not given. A resumed run continues its run there."""

    log_samples: int = 16
    """Samples of a rollout, and of every evaluation set, to write into the run directory; 0: none."""

    log_samples_interval: int = 1
    """Write them after every so many rollouts, and of every evaluation."""
