"""Names and meanings of everything a run logs.

A reward function of the user's may add `rollout/reward/<name>`, a correction of the user's
`tis/<name>`. Evaluation sets that have names log `eval/<set>/<metric>` instead of `eval/<metric>`, and
tokens of a lag `lag/<lag>/<metric>`.
"""

MEANINGS = {
    "rollout/raw_reward": "mean reward of the rollout's samples",
    "rollout/reward_std": "standard deviation of those rewards",
    "rollout/reward_timeouts": "samples that the reward rule did not finish in time; they score 0",
    "rollout/reward_errors": "samples that the reward rule failed on, by error or crash; they score 0",
    "rollout/response_length": "mean length of the responses, in tokens",
    "rollout/response_length_max": "length of the longest response",
    "rollout/truncated_ratio": "share of responses that reached the length limit",
    "rollout/log_probs": "mean log-probability of the sampled tokens, from the rollout engine",
    "rollout/num_cached_tokens": "prompt tokens that were found in the engines' prefix caches",
    "rollout/num_filtered_groups": "groups left out because all their rewards are equal",
    "rollout/num_resampled_groups": "groups with equal rewards that others were drawn in the place of",
    "rollout/num_surplus_groups": "complete groups that were more than the rollout needed, and dropped",
    "parity/num_compared_tokens": "tokens of the first optimizer step, all of lag 0 compared bit by bit",
    "parity/num_mismatched_tokens": "tokens among them with another log-probability in training",
    "parity/max_ulp": "largest distance between two such values, in representable numbers",
    "train/train_rollout_logprob_abs_diff": "mean |train - rollout| over the compared tokens",
    "train/k3_kl": "mean exp(r) - r - 1, r = train - rollout, over the compared tokens",
    "parity/num_fallbacks": "1 if a mismatch made this rollout one for the correction",
    "probe/num_compared_tokens": "tokens that the engines sampled for the probe after the push",
    "probe/num_mismatched_tokens": "tokens among them with another log-probability in the trainer",
    "probe/max_ulp": "largest distance between two such values, in representable numbers",
    "probe/k3": "mean exp(r) - r - 1 over them: how far the engines are apart without staleness",
    "lag/mean": "mean pushes between the weights that sampled a token and those that learn from it",
    "lag/share": "share of the tokens that have this lag",
    "lag/k3": "mean exp(r) - r - 1 over them, r = log pi_train - log pi_rollout",
    "lag/ess": "effective sample size of their weights, as a share of their number",
    "lag/clip_share": "share of them whose ratio is above --tis-upper-bound",
    "lag/rejected_share": "share of them that rejection drops",
    "train/opsm_fraction": "share of tokens that off-policy sequence masking dropped",
    "routing/differing_share": "share of tokens x layers where the trainer's router chose otherwise",
    "routing/k3_without_replay": "mismatch/k3 as it would be with the trainer's own choices",
    "mismatch/k1": "mean log pi_rollout - log pi_train, in nats per token",
    "mismatch/k3": "mean exp(r) - r - 1 per token, r = log pi_train - log pi_rollout",
    "mismatch/abs_diff": "mean |r| per token",
    "mismatch/tv": "estimated total variation distance per token: mean |rho - 1| / 2",
    "mismatch/chi2_token": "mean rho^2 - 1 over tokens",
    "mismatch/chi2_sequence": "mean rho^2 - 1 over sequences, rho of a sequence being a product",
    "mismatch/ess": "effective sample size of the token weights, as a share of the batch",
    "mismatch/train_log_ppl": "mean over sequences of -log pi_train per token",
    "mismatch/rollout_log_ppl": "the same for pi_rollout",
    "mismatch/log_ppl_diff": "mean over sequences of their difference, train - rollout",
    "mismatch/log_ppl_abs_diff": "mean of its absolute value",
    "mismatch/log_ppl_abs_diff_sum": "the same of sums over tokens, not means (2602.01826, eq. 7)",
    "mismatch/prob_diff_mean": "mean |pi_train - pi_rollout| at the sampled tokens",
    "mismatch/prob_diff_max": "its largest value",
    "mismatch/prob_diff_std": "its standard deviation",
    "mismatch/prob_pearson": "correlation of pi_train and pi_rollout over tokens",
    "mismatch/clamped_fraction": "share of tokens with |r| > 20, where exp(r) is cut",
    "mismatch/nonfinite_fraction": "share of tokens whose log-probabilities are not finite",
    "correction/weight_mean_before": "mean importance weight before its bounds",
    "correction/weight_min_before": "smallest",
    "correction/weight_max_before": "largest",
    "correction/weight_mean": "mean weight that the loss uses, over the tokens that are left",
    "correction/weight_min": "smallest",
    "correction/weight_max": "largest",
    "correction/truncated_fraction": "share of tokens whose weight was cut at the upper bound",
    "correction/clipped_low_fraction": "share of tokens whose weight was raised to the lower bound",
    "correction/clipped_high_fraction": "share of tokens whose weight was cut at the upper bound",
    "correction/masked_low_fraction": "share of tokens left out for a weight below its bound",
    "correction/masked_high_fraction": "share of tokens left out for a weight above its bound",
    "correction/rejected_low_fraction": "share of tokens that rejection rules drop, ratio too small",
    "correction/rejected_high_fraction": "the same, ratio too large",
    "correction/veto_token_fraction": "share of tokens beyond the veto",
    "correction/veto_sequence_fraction": "share of sequences that the veto drops",
    "correction/rejected_fraction": "share of tokens that the policy loss does not see, in all",
    "correction/nonfinite_fraction": "share of tokens rejected as not finite",
    "correction/batch_norm_factor": "mean weight that weights were divided by, rejected ones left out",
    "dc/lambda": "price of a unit of discrepancy that was applied",
    "dc/delta_mean": "mean discrepancy",
    "dc/delta_max": "largest discrepancy",
    "dc/violation": "mean discrepancy minus the budget",
    "dc/penalty_mean": "mean of what was subtracted from advantages",
    "dc/sign_flip_fraction": "share of tokens whose advantage changed its sign",
    "lr_decay/scale": "factor of the learning rate by length decay",
    "lr_decay/onset": "rollout at which response lengths surged; 0: not seen",
    "lr_decay/period": "rollouts between two decays; 0: not known yet",
    "lr_decay/num_decays": "decays so far",
    "lr_decay/length_ratio": "mean response length over its baseline",
    "governor/rung": "0 stock, 1 tis, 2 mis, 3 decayed learning rate, 4 aligned",
    "perf/log_probs_time": "seconds of old and reference log-probabilities before the loss",
    "train/loss": "loss of the optimizer steps, on average",
    "train/pg_loss": "its policy-gradient term",
    "train/pg_clipfrac": "share of tokens whose ratio was clipped",
    "train/ppo_kl": "mean old - new log-probability",
    "train/kl_loss": "KL penalty towards the reference model, before its coefficient",
    "train/entropy": "entropy of the policy at the sampled tokens, in nats",
    "train/grad_norm": "norm of the gradient before clipping",
    "train/lr": "learning rate",
    "perf/rollout_time": "seconds of sampling and scoring during the step",
    "perf/rollout_wait_time": "seconds after training in which the push waited for what is drawn ahead",
    "perf/rollout_tokens_per_second": "response tokens per second of sampling",
    "perf/train_time": "seconds of training",
    "perf/train_tokens_per_second": "prompt and response tokens per second of training",
    "perf/weight_sync_time": "seconds to push the weights and verify them",
    "perf/step_time": "seconds of the whole step",
    "perf/rollout_idle_share": "share of the step in which the engines neither sampled nor took weights",
    "perf/trainer_idle_share": "share of the step in which the trainer neither trained nor sent weights",
    "eval/avg@k": "mean reward over evaluation prompts and their k samples",
    "eval/pass@k": "share of evaluation prompts with a sample of positive reward",
    "eval/truncated_ratio": "share of evaluation responses that reached the length limit",
    "eval/response_length": "mean length of evaluation responses",
}

for _estimator in (
    "no_is",
    *(f"{a}_{b}" for a in ("token", "sequence") for b in ("is", "tis", "mis")),
):
    MEANINGS[f"estimator/{_estimator}_bias"] = "bound of its gradient's bias, in units of the score"
    MEANINGS[f"estimator/{_estimator}_variance"] = "bound of its variance, in units of its square"


def meaning(metric: str) -> str:
    """What a metric says; empty if it is not one of the above."""
    kind, _, rest = metric.partition("/")
    eval_set, _, name = rest.partition("/")
    if kind == "eval" and name:
        return f"{MEANINGS.get(f'eval/{name}', '')} (of the set {eval_set})"
    if kind == "lag" and name:
        return f"{MEANINGS.get(f'lag/{name}', '')} (of lag {eval_set})"
    return MEANINGS.get(metric, "")
