"""Asks a real server for the log-probabilities of prompts."""

import requests
import torch


def ask_of_prompts(engines, prompts, *, temperature=1.0, **fields):
    """What /generate answers, one dictionary a prompt; all are in one request, and so in batches."""
    server = engines.rollout.servers[0]
    temperatures = [temperature] * len(prompts) if isinstance(temperature, float) else temperature
    params = [
        {"max_new_tokens": 1, "temperature": value, "sampling_seed": 3} for value in temperatures
    ]
    body = {
        "input_ids": prompts, "sampling_params": params, "return_logprob": True,
        "logprob_start_len": 0, **fields,
    }  # fmt: skip
    headers = {"Authorization": f"Bearer {server.spec.api_key}"}
    answer = requests.post(f"{server.url}/generate", json=body, headers=headers, timeout=120)
    assert answer.status_code == 200, answer.text
    return [each["meta_info"] for each in answer.json()]


def of_prompt(meta):
    """float32 [n - 1]: of all tokens but the first that was asked for, which nothing precedes."""
    first, *others = meta["input_token_logprobs"]
    assert first[0] is None
    return torch.tensor([value for value, *_ in others])
