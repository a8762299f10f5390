"""Reward functions as users of other frameworks write them."""


def trl_documented(prompts, completions):
    """The signature that TRL's type documented, to which it passed more (trl#4939)."""
    assert len(prompts) == len(completions) and isinstance(prompts[0], str)
    return [float(len(each)) for each in completions]


def trl_of_a_chat(completions, assistant, **columns):
    """A column's name for the label (Qwen-VL-Series-Finetune#234)."""
    texts = [turns[0]["content"] for turns in completions]
    assert columns["difficulty"] == ["hard"] * len(texts) and len(columns["completion_ids"]) == len(
        texts
    )
    return [float(text == wanted) for text, wanted in zip(texts, assistant, strict=True)]


async def trl_async(completions, **kwargs):
    """ms-swift#7251: an example that awaits nothing."""
    return [1.0] * len(completions)


def trl_not_applicable(completions, **kwargs):
    return [None] * len(completions)


def verl_flexible(solution_str, ground_truth):
    """verl's own modules, which take less than its guide says (verl#3374)."""
    return {"score": float(solution_str == ground_truth), "acc": True, "pred": solution_str}


def verl_guide(data_source, solution_str, ground_truth, extra_info=None):
    return float((data_source, extra_info["split"]) == ("gsm8k", "train"))


async def slime(args, sample, **kwargs):
    return {
        "score": len(sample.response) / 2,
        "tokens": sample.response_length,
        "hard": sample.metadata["difficulty"] == "hard",
    }


def slime_that_reads_flags(args, sample):
    return args.rm_url


def rubric(completion, answer, info=None):
    return float(completion == answer) if info is None else 0.0


def rubric_with_state(completion, answer, state, parser):
    return 0.0
