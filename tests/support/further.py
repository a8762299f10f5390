"""What `make test-further` runs and CI does not: a property that CI tests, on further combinations.

CI has to end within half an hour, and these would be a quarter of its tests' time. A comment says where
CI has the property.
"""

import pytest

ADAPTERS = "onpolicy/training/megatron/test_megatron_adapters.py::"
COMMANDS = "e2e/test_documented_commands.py::test_it_works["
QUARTER = "benchmarks/test_gpu_quarter.py::"
SESSIONS = "onpolicy/agents/gateway/test_random_sessions.py::test_in_ten_thousand_sessions"

FURTHER = (
    # What the two calls start is tested by itself; rehearse them before a GPU is lent.
    f"{QUARTER}test_the_first_call_is_rehearsed",
    f"{QUARTER}test_the_second_call_is_rehearsed",
    f"{QUARTER}test_a_call_that_is_cut_loses_only_what_it_had_not_measured[terminated]",  # [killed]
    # What `bench` measures: test_bench.py; that its command works: [bench rollout].
    *(f"{COMMANDS}bench {what} " for what in ("agents", "decode", "loop", "step")),
    "e2e/test_commands_on_cluster.py::test_servers_of_all_hosts_are_measured",
    # [gateway on Megatron], and [engine] of grammars.
    "e2e/test_agents_on_ranks.py::test_two_engines_and_two_ranks_train_an_agent_to_the_bits_of_one[f",
    "e2e/test_agents_on_ranks.py::test_sets_of_grammars_are_the_same_where_ranks_share_a_sample[meg",
    "e2e/test_agents_on_ranks.py::test_sets_of_grammars_are_the_same_where_ranks_share_a_sample[con",
    # Lost engines, ranks and hosts: test_training.py, and the rest of these files.
    "e2e/test_adapters.py::test_three_ranks_that_lose_an_engine_and_one_of_them",
    "e2e/test_async.py::test_an_engine_that_is_killed_while_it_samples_ahead",
    "e2e/test_push_faults.py::test_a_process_that_is_killed_during_a_push_costs_a_restart_and_no_bit[disk",
    "e2e/test_push_faults.py::test_a_process_that_is_killed_during_a_push_costs_a_restart_and_no_bit[dist",
    "e2e/test_push_faults.py::test_two_ranks_and_two_servers_push_again_when_one_dies_and_end_with_the_"
    "same_hash[tensor",
    "onpolicy/run/test_run_hashes.py::test_a_schedule_has_one_hash_on_all_clusters_and_through_all_"
    "faults[(2, F",
    "onpolicy/run/test_run_hashes.py::test_a_schedule_has_one_hash_on_all_clusters_and_through_all_"
    "faults[(1, T",
    # [dense on Megatron], and digests of every operator: onpolicy/ops/test_portable.py.
    "e2e/test_portable.py::test_a_run_has_the_hash_of_every_other_machine[dense]",
    "e2e/test_portable.py::test_a_run_has_the_hash_of_every_other_machine[experts]",
    # [head bias], [qwen3-moe] and others; all architectures without a server: test_architectures.py.
    "e2e/test_verify.py::test_no_token_differs_where_heads_routers_or_norms_are_unusual[layernorm1p]",
    "e2e/test_verify.py::test_no_token_differs_where_heads_routers_or_norms_are_unusual[sparsemixer]",
    "e2e/test_verify.py::test_no_token_differs_in_float32[qwen2]",
    "e2e/test_verify.py::test_no_token_differs_in_float32[qwen3-tied]",
    "e2e/test_verify.py::test_no_token_differs_with_a_rollout_on_two_tensor_parallel_ranks[llama]",
    "e2e/test_score_centering.py::test_a_centered_run_learns[icepop]",
    # [layers.1.self_attn.k_proj], and every site: onpolicy/explain/test_every_fault_is_found.py.
    "e2e/test_explained_adapters.py::test_what_was_not_pushed_of_an_adapter_is_named_and_proven[lm_",
    "e2e/test_explained_adapters.py::test_what_was_not_pushed_of_an_adapter_is_named_and_proven[layers.1.m",
    "e2e/test_explain.py::test_two_ranks_of_a_trainer_are_explained_by_a_command[pipeline]",
    "onpolicy/explain/test_megatron.py::test_a_fault_of_the_last_rank_is_found_and_nothing_else_differs[c",
    "onpolicy/explain/test_megatron.py::test_what_ranks_share_of_an_adapter_is_put_together[sizes0",
    # [qwen3] of each; other layouts and experts in the same file.
    f"{ADAPTERS}test_in_bfloat16_the_first_log_probabilities_are_those_of_the_other_engine[a rounded",
    f"{ADAPTERS}test_in_bfloat16_the_first_log_probabilities_are_those_of_the_other_engine[norms",
    f"{ADAPTERS}test_adapters_of_experts_compute_and_learn_as_in_the_other_engine[qwen3-moe-tensor]",
    f"{ADAPTERS}test_adapters_of_experts_compute_and_learn_as_in_the_other_engine[qwen2-moe",
    f"{ADAPTERS}test_four_ranks_share_adapters_of_experts_both_ways",
    f"{ADAPTERS}test_layers_that_are_computed_again_learn_the_same[data-lm_head]",
    f"{ADAPTERS}test_layers_that_are_computed_again_learn_the_same[pipeline-q",
    f"{ADAPTERS}test_the_reference_is_the_base_in_the_same_memory[pipeline]",
    # [rounded weights] of either, [adapters of experts] on three ranks, [adapters] on four.
    "onpolicy/training/test_rank_invariance.py::test_fsdp_has_the_same_bits_on_any_number_of_ranks[with",
    "onpolicy/training/test_rank_invariance.py::test_fsdp_has_the_same_bits_on_any_number_of_ranks["
    "adapters b",
    "onpolicy/training/fsdp/test_replicas.py::test_every_split_of_ranks_has_the_bits_of_one[of experts]",
    "onpolicy/training/fsdp/test_replicas.py::test_every_split_of_ranks_has_the_bits_of_one[many",
    # Triton's interpreter; the rule's kernels: onpolicy/ops/triton/.
    "onpolicy/models/test_delta_net_in_triton.py",
    "test_requirements.py::test_the_gpu_extra_can_be_installed_and_megatron_beside_it[3.12]",  # [3.11]
    # [0] to [2], which are 1,500 of the ten thousand.
    *(f"{SESSIONS}_every_learnt_token_was_sampled_and_is_learnt_once[{n}]" for n in range(3, 20)),
)
"""How names of tests begin, below tests/."""


def mark(config, items):
    """Give these tests their mark. Raises UsageError, where whole files are collected, for a name that
    no test has."""
    files = {item.nodeid.partition("::")[0] for item in items} if config.args == ["tests"] else ()
    for name in FURTHER:
        found = [item for item in items if item.nodeid.startswith(f"tests/{name}")]
        for item in found:
            item.add_marker(pytest.mark.further)
        if not found and f"tests/{name.partition('::')[0]}" in files:
            raise pytest.UsageError(f"tests/support/further.py: no test begins with tests/{name}")
