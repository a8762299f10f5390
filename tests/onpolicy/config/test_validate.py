import pytest

from onpolicy.cli.parse import parse
from onpolicy.config import TrainConfig, validate
from onpolicy.errors import ConfigError

GOOD = ["--hf-checkpoint", "/m", "--prompt-data", "/d.jsonl", "--rm-type", "exact"]
MODE = ["--true-on-policy-mode"]
ALONE = ["--n-samples-per-prompt", "1", "--advantage-estimator"]
HOSTS = ["--actor-num-nodes", "2", "--actor-num-ranks-per-node"]
IN_STAGES = ["--train-backend", "megatron", "--megatron-pp", "2"]


def check(*argv):
    validate(parse(TrainConfig, [*GOOD, *argv], "onpolicy train"))


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--rollout-batch-size", "0"], "--rollout-batch-size=0: must be at least 1"),
        (["--lr", "-1"], "--lr=-1.0: must be at least 0"),
        (["--lr", "nan"], "--lr=nan: must be at least 0"),
        (["--adam-beta2", "1"], r"--adam-beta2=1.0: must be in \[0, 1\)"),
        (["--length-decay-default-period", "-1"], "--length-decay-default-period=-1: must be at least"),
        (["--lambd", "0.9"], "--lambd=0.9: only --advantage-estimator gae reads it"),
        (["--critic-load", "/c"], "--critic-load=/c: only --advantage-estimator gae reads it"),
        (
            ["--advantage-estimator", "gae", "--num-rollout", "3", "--num-critic-only-steps", "3"],
            "--num-critic-only-steps=3: the policy would learn from none of the 3 rollouts",
        ),
        (["--rm-time-limit", "0"], "--rm-time-limit=0.0: must be greater than 0"),
        (["--rollout-temperature", "0"], "--rollout-temperature=0.0: .*greedy"),
        (["--rm-type", ""], "exactly one of them"),
        (["--custom-rm-path", "a.b"], "exactly one of them"),
        (["--n-samples-per-prompt", "1"], "--n-samples-per-prompt=1: --advantage-estimator grpo"),
        (["--save-interval", "5"], "--save-interval=5, --save='': the one does nothing"),
        (["--save", "/s"], "--save-interval=0, --save='/s'"),
        (["--keep-checkpoints", "2"], "--keep-checkpoints=2: only --save reads it"),
        (["--keep-checkpoints", "-1"], "--keep-checkpoints=-1: must be at least 0"),
        (["--allow-changed-settings", "lr"], "-changed-settings=lr: only --load or --replay reads it"),
        (["--load", "/s", "--allow-changed-settings", "lrr"], "settings=lrr: no .* Did you mean lr?"),
        (["--eval-interval", "5"], "--eval-interval=5, --eval-prompt-data=''"),
        (["--rollout-host", "0.0.0.0"], "--rollout-host=0.0.0.0: .*needs a key"),
        (["--rollout-server-url", "http://x", "--rollout-num-engines", "2"], "no server is started"),
        (["--rollout-server-url", "http://x", "--sglang-tp-size", "2"], "nothing would read it"),
        (["--sglang-dtype", "float16"], "--sglang-dtype: .*Use --dtype"),
        (["--hf-checkpoint", ""], "--hf-checkpoint is missing"),
        (["--dtype", "float16", "--rollout-weight-format", "int8"], "format=int8: .*bfloat16 and"),
        (["--dtype", "float16", "--true-on-policy-mode", "--rollout-activation-format", "fp8_e4m3"],
            "--rollout-activation-format=fp8_e4m3: .*Choose --dtype bfloat16"),
        (["--share-prefixes", "on"], "--share-prefixes.*Add --true-on-policy-mode"),
        (["--images"], "--images=True: stock engines do not .*Add --true-on-policy-mode"),
        ([*MODE, "--images", "--share-prefixes", "on"], "--share-prefixes=on: a prefix with images"),
        ([*MODE, "--images", "--train-backend", "megatron"], "True: --train-backend=megatron was"),
        ([*MODE, "--images", "--sglang-tp-size", "2"], "--images=True: --sglang-tp-size=2 was made for"),
        ([*MODE, "--images", "--rollout-weight-format", "int8"], "--rollout-weight-format=int8 was"),
        (["--row-parallel-blocks", "2"], "--row-parallel-blocks=2: without aligned operators"),
        (["--operators", "triton"], "--operators=triton: without --true-on-policy-mode"),
        (["--share-prefixes", "on", "--true-on-policy-mode", "--train-backend", "megatron",
            "--megatron-cp", "2"], "--megatron-cp=2: .*stretches of whole sequences"),
        (["--fsdp-shard-ranks", "-1"], "--fsdp-shard-ranks=-1: must be at least 0"),
        (["--fsdp-shard-ranks", "2"], "--fsdp-shard-ranks=2: the trainer's 1 ranks .*Possible are 1."),
        ([*HOSTS, "6", "--fsdp-shard-ranks", "5"], "-ranks=5: the trainer's 12 ranks .* and the 6 of a"),
        ([*HOSTS, "6", "--fsdp-shard-ranks", "4"], "-ranks=4: .*Possible are 1, 2, 3, 6, 12"),
        ([*HOSTS, "2", "--fsdp-shard-ranks", "2", "--train-backend", "megatron"],
            "--fsdp-shard-ranks=2: only --train-backend fsdp reads it"),
    ],
)  # fmt: skip
def test_a_bad_value_is_refused_by_name_with_a_remedy(argv, message):
    with pytest.raises(ConfigError, match=message):
        check(*argv)


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--rollout-top-k", "1"], "--rollout-top-k=1: .*of one token that is 0"),
        (["--sglang-kv-cache-dtype", "fp8_e4m3"], "--sglang-kv-cache-dtype: .*because cached keys"),
        (["--sglang-mamba-ssm-dtype", "bfloat16"], "--sglang-mamba-ssm-dtype: .*because states of"),
        (["--sglang-speculative-algorithm", "NGRAM"], "speculative-algorithm: .*its seed draws it"),
        (["--sglang-speculative-num-draft-tokens=4"], "speculative-num-draft-tokens: not with"),
        (["--sglang-enable-lora"], "--sglang-enable-lora"),
        (["--sglang-quantization=fp8"], "--sglang-quantization"),
        (["--sglang-attention-backend", "triton"], "--sglang-attention-backend"),
        (["--sglang-page-size", "128"], "--sglang-page-size: .*pages of one token"),
        (["--sglang-enable-tf32-matmul"], "--sglang-enable-tf32-matmul: .*TF32"),
        (["--sglang-enable-flashinfer-allreduce-fusion"], "order of sums over ranks"),
        (["--sglang-enable-mscclpp"], "--sglang-enable-mscclpp"),
        (["--sglang-enable-quant-communications"], "--sglang-enable-quant-communications"),
        (["--sglang-bf16-gemm-backend", "cutedsl"], "--sglang-bf16-gemm-backend"),
        (["--sglang-cuda-graph-backend-prefill", "tc_piecewise"], "no tc_piecewise with"),
        (
            ["--sglang-cuda-graph-config", '{"prefill":{"backend":"tc_piecewise"}}'],
            "no tc_piecewise",
        ),
        (["--sglang-enforce-piecewise-cuda-graph"], "compiled operators round differently"),
        (
            ["--sglang-rl-on-policy-target", "fsdp"],
            "--sglang-rl-on-policy-target: .*take its place",
        ),
    ],
)
def test_true_on_policy_mode_refuses_what_breaks_it_and_stock_does_not(argv, message):
    with pytest.raises(ConfigError, match=message):
        check(*MODE, *argv)
    check(*argv)


@pytest.mark.parametrize(
    "flag", ["tokenizer-worker-num", "grpc-mode", "smg-grpc-mode", "grpc-port"]
)
@pytest.mark.parametrize("mode", [MODE, ["--no-true-on-policy-mode"]])
def test_no_server_listens_where_sglang_asks_for_no_key(flag, mode):
    with pytest.raises(ConfigError, match=f"--sglang-{flag}: SGLang asks for no key"):
        check(*mode, f"--sglang-{flag}", "2")


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--sglang-tp-size", "3"], r"--sglang-tp-size=3: must be a power of two.*binary tree"),
        (["--sglang-tp", "0"], r"--sglang-tp-size=0: must be at least 1"),
        (["--row-parallel-blocks", "6"], r"--row-parallel-blocks=6: must be a power of two"),
        (["--row-parallel-blocks", "-2"], r"--row-parallel-blocks=-2: must be a power of two"),
        (
            ["--sglang-tp-size", "4", "--row-parallel-blocks", "2"],
            r"--row-parallel-blocks=2: must be a power of two and at least --sglang-tp-size=4",
        ),
        (["--sglang-enable-dp-attention"], r"--sglang-enable-dp-attention: .*one way to share"),
    ],
)
def test_degrees_whose_sums_make_no_tree_are_refused(argv, message):
    with pytest.raises(ConfigError, match=message):
        check(*MODE, *argv)


@pytest.mark.parametrize(
    ("argv", "blocks"),
    [
        (MODE, 1),
        ([*MODE, "--sglang-tp-size", "4"], 4),
        ([*MODE, "--sglang-tp-size", "2", "--row-parallel-blocks", "8"], 8),
        ([*MODE, "--row-parallel-blocks", "8"], 8),
        ([*MODE, "--train-backend", "megatron", "--megatron-tp", "4"], 4),
        (["--sglang-tp-size", "3"], 1),
        (["--mismatch-governor", "--sglang-tp-size", "2"], 2),
    ],
)
def test_blocks_are_the_largest_degree_unless_more_are_asked_for(argv, blocks):
    check(*argv)
    assert parse(TrainConfig, argv, "x").plan.row_parallel_blocks == blocks


def test_impossible_batch_sizes_print_the_equation_and_what_is_possible():
    with pytest.raises(
        ConfigError, match=r"rollout_batch_size 4 x n_samples_per_prompt 3 = 12.*1, 2, 3, 4, 6, 12"
    ):
        check(
            "--rollout-batch-size", "4", "--n-samples-per-prompt", "3", "--global-batch-size", "5"
        )


def test_the_batch_equation_says_all_four_sizes():
    config = parse(
        TrainConfig,
        ["--rollout-batch-size", "4", "--n-samples-per-prompt", "6", "--global-batch-size", "8"],
        "x",
    )
    assert config.steps_per_rollout == 3
    assert config.batch_equation() == (
        "rollout_batch_size 4 prompts x n_samples_per_prompt 6 = 24 samples = "
        "global_batch_size 8 x 3 optimizer steps"
    )


@pytest.mark.parametrize(
    ("argv", "policy"),
    [
        ([], "warn"), (MODE, "fail"), ([*MODE, "--parity-policy", "warn"], "warn"),
        (["--parity-policy", "fail"], "fail"),
    ],
)  # fmt: skip
def test_a_mismatch_stops_the_run_by_default_in_true_on_policy_mode(argv, policy):
    assert parse(TrainConfig, argv, "x").plan.on_aligned_mismatch == policy


FALLBACK = [*MODE, "--parity-policy", "fallback"]
GOVERNOR = ["--mismatch-governor"]


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (
            [*MODE, "--use-tis"],
            r"--use-tis=True: with --true-on-policy-mode the ratio is exactly 1",
        ),
        ([*MODE, "--dc-mode", "fixed"], r"--dc-mode=fixed: .*nothing to correct"),
        (
            ["--parity-policy", "fallback", "--use-tis"],
            r"--parity-policy=fallback: without aligned",
        ),
        (FALLBACK, r"--parity-policy=fallback: needs a correction to fall back to"),
        (
            [*GOVERNOR, "--rollout-server-url", "http://x"],
            r"--mismatch-governor=True: .*cannot start",
        ),
        ([*GOVERNOR, "--use-rollout-logprobs"], r"--mismatch-governor=True: .*on every rung"),
        ([*GOVERNOR, "--rollout-top-k", "1"], r"--rollout-top-k=1"),
        ([*GOVERNOR, "--sglang-quantization", "fp8"], r"--sglang-quantization: not with"),
    ],
)
def test_a_correction_that_nothing_would_apply_is_refused(argv, message):
    with pytest.raises(ConfigError, match=message):
        check(*argv)


@pytest.mark.parametrize(
    "argv",
    [
        ["--use-tis", "--use-rs", "--dc-mode", "lagrangian"],
        ["--use-rollout-logprobs"],
        ["--custom-tis-function-path", "a.b", "--use-tis", "--use-rs", "--tis-batch-normalize"],
        [*FALLBACK, "--use-tis"],
        [*GOVERNOR, "--rollout-weight-format", "int8"],
        [*GOVERNOR, *MODE],
        [*MODE, "--rollout-weight-format", "int8"],
        [*GOVERNOR, "--governor-highest", "decay", "--rollout-top-k", "1"],
        [*MODE, "--rollout-top-p", "0.9", "--rollout-top-k", "20", "--rollout-min-p", "0.1"],
        [], MODE, [*MODE, *IN_STAGES],
        *([*ALONE, estimator] for estimator in ("gae", "reinforce", "reinforce_plus_plus")),
        [*MODE, "--sglang-cuda-graph-backend-prefill", "breakable"],
        [*MODE, "--operators", "triton"], [*GOVERNOR, "--operators", "hopper"],
    ],
)  # fmt: skip
def test_what_has_all_it_needs_is_accepted(argv):
    check(*argv)
