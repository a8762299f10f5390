"""Models that also see images: their text part computes, trains and is saved as a part of the whole."""

import json

import peft
import pytest
import torch
from peft.tuners.lora import LoraLayer
from safetensors.torch import load_file, save_file
from transformers import AutoModelForImageTextToText, AutoModelForTokenClassification

from onpolicy.errors import ConfigError
from onpolicy.models.empty import empty_causal_lm
from onpolicy.models.facts import ModelFacts
from onpolicy.models.hf_config import load_config, parse_config, require_alignable
from onpolicy.models.hf_export import export_checkpoint
from onpolicy.models.lora.adapters import adapters
from onpolicy.models.lora.merged import export_merged
from onpolicy.models.stored import stored_tensors
from onpolicy.models.text_part import WHOLE_MODELS, own_name, own_names, stored_name
from onpolicy.models.tokenizer import load_tokenizer
from onpolicy.models.weight_files import INDEX, CheckpointReader, matched_model, require_fit
from onpolicy.run import saving
from onpolicy.training.advantages import RewardEstimator
from tests.support.exported_parts import faults, stored
from tests.support.published import FILES, make_published, published, write_config
from tests.support.samples import make_train_sample
from tests.support.unstarted_run import make_run, state_after

WHOLE = [name for name in FILES if published(name).get("model_type") in WHOLE_MODELS]
TOKENS = torch.randint(2, 137, (2, 60), generator=torch.Generator().manual_seed(0))


def test_a_published_form_of_each_is_tried():
    assert {published(name)["model_type"] for name in WHOLE} == {*WHOLE_MODELS}


def text_model(path, dtype):
    """The text part alone, by transformers' own operators, with the weights of the whole's files."""
    config = load_config(str(path))
    state = dict(CheckpointReader(path).tensors())
    kind = type(empty_causal_lm(config, False))
    return kind.from_pretrained(None, config=config, state_dict=state, dtype=dtype).eval()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", WHOLE)
def test_the_text_part_computes_what_the_whole_computes_on_text(name, dtype, tmp_path):
    """For Qwen3-VL that is Qwen3: its three positions of a token of text are one."""
    path = make_published(tmp_path, name)
    whole = AutoModelForImageTextToText.from_pretrained(path, dtype=dtype).eval()
    text = text_model(path, dtype)
    with torch.no_grad():
        expected = whole(TOKENS).logits
        assert expected.isfinite().all() and torch.equal(text(TOKENS).logits, expected)
        text.model.norm.weight[0] += 0.5
        assert not torch.equal(text(TOKENS).logits, expected)


@pytest.mark.parametrize("name", WHOLE)
def test_a_trained_text_part_is_saved_in_the_whole_whose_other_parts_keep_their_bits(
    name, tmp_path
):
    path = make_published(tmp_path / "model", name)
    (path / "preprocessor_config.json").write_text('{"size": 56}')
    try:
        require_alignable(ModelFacts(load_config(str(path))), 64)
    except ConfigError as error:
        pytest.skip(f"until this is aligned: {error}")
    config, engines = make_run(path, tmp_path)
    trainer = engines.trainer
    train(trainer)
    saving.save(config, engines, state_after(1))
    hf = tmp_path / "save" / "step_000001" / "hf"
    assert (hf / "preprocessor_config.json").read_text() == '{"size": 56}'
    assert load_tokenizer(str(hf)).get_vocab() == load_tokenizer(str(path)).get_vocab()
    assert [*faults(path, hf)] == []

    trained = {n: x for bucket in trainer.policy.weight_buckets(1 << 30) for n, x in bucket}
    read = dict(CheckpointReader(hf).tensors())
    assert trained.keys() == read.keys()
    assert all(torch.equal(read[n], x) for n, x in trained.items())
    whole, info = AutoModelForImageTextToText.from_pretrained(hf, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    with torch.no_grad():
        expected = text_model(hf, torch.float32)(TOKENS).logits
        assert torch.equal(whole.eval()(TOKENS).logits, expected)

    towers = [n for n in stored(path) if own_name(n) is None and "weight" in n]
    replace(hf, towers[0], lambda x: x.flatten().index_fill(0, torch.tensor(0), 7.0).view_as(x))
    old = stored(path)[norm_of(path)]
    replace(hf, norm_of(path), lambda x: old)
    assert {*faults(path, hf)} == {f"{towers[0]}: changed", f"{norm_of(path)}: not trained"}


def norm_of(path):
    return stored_name("model.norm.weight", own_names(stored(path), "it"))


def train(trainer):
    trainer.learner.estimator = RewardEstimator("reinforce")  # of a sample that is alone
    sequence = TOKENS[0].tolist()
    (log_probs,) = trainer.log_probs([sequence], [4], 1.0)
    sample = make_train_sample(sequence, 4, log_probs.tolist(), reward=1.0)
    trainer.train([sample], step=0, rates=[1e-2])


def replace(directory, name, change):
    for file in directory.glob("*.safetensors"):
        tensors = load_file(file)
        if name in tensors:
            tensors[name] = change(tensors[name])
            save_file(tensors, file, {"format": "pt"})


CLOSE = 1e-5
"""Between log-probabilities of float32 models that sum in other orders."""


@pytest.mark.parametrize(
    ("name", "targets"),
    [
        ("gemma-3-4b-it", "all-linear"),
        ("qwen3-vl-4b-instruct", "q_proj,down_proj"),
        ("llama-4-scout", "q_proj,v_proj"),  # of its experts PEFT takes the transpose
    ],
)
def test_peft_puts_an_adapter_of_the_text_part_into_the_whole_and_merging_keeps_the_tower(
    name, targets, tmp_path
):
    path = make_published(tmp_path / "model", name)
    _, engines = make_run(path, tmp_path, lora_rank=2, lora_target_modules=targets)
    trainer, tokens = engines.trainer, TOKENS[0]
    without, ours = (log_probs_of(trainer, tokens, draws) for draws in (False, True))
    trainer.export(tmp_path / "adapter")
    whole = AutoModelForImageTextToText.from_pretrained(path, dtype=torch.float32).eval()
    model = peft.PeftModel.from_pretrained(whole, tmp_path / "adapter")
    named = [n for n, m in model.named_modules() if isinstance(m, LoraLayer)]
    assert named and all("language_model" in n for n in named)
    found = log_probs_by(model, tokens)
    assert (found - ours).abs().max() < CLOSE and (found - without).abs().max() > 100 * CLOSE

    export_merged(path, str(tmp_path / "adapter"), tmp_path / "merged", "float32")
    assert not [x for x in faults(path, tmp_path / "merged") if not x.endswith("not trained")]
    whole = AutoModelForImageTextToText.from_pretrained(tmp_path / "merged").eval()
    assert (log_probs_by(whole, tokens) - ours).abs().max() < CLOSE


def log_probs_of(trainer, tokens, draws):
    """Of a trainer with adapters whose B is drawn, or zero."""
    with torch.no_grad():
        for adapter in adapters(trainer.policy.module):
            for name, factor in adapter.named_parameters():
                if name.endswith("B"):
                    factor.to_local().normal_(std=0.05) if draws else factor.to_local().zero_()
    return trainer.log_probs([tokens.tolist()], [1], 1.0)[0]


def log_probs_by(model, tokens):
    with torch.no_grad():
        table = torch.log_softmax(model(input_ids=tokens[None]).logits[0, :-1], -1)
    return table.gather(1, tokens[1:, None])[:, 0]


@pytest.mark.parametrize(("rank", "copies"), [(0, True), (2, False)])
def test_the_room_that_a_checkpoint_needs_includes_what_is_copied(
    rank, copies, tmp_path, monkeypatch
):
    path = make_published(tmp_path / "model", "gemma-3-4b-it")
    config, engines = make_run(path, tmp_path, lora_rank=rank)
    monkeypatch.setattr(saving.write, "free_bytes", lambda directory: 0)
    others = sum(x.numel() for n, x in stored(path).items() if own_name(n) is None)
    with pytest.raises(ConfigError) as refusal:
        saving.write.require_room(config, engines.hf_config, engines.contract.adapter)
    assert (f" + {others:,} parameters of other parts x 4 = " in str(refusal.value)) == copies


def test_a_critic_is_saved_as_a_text_part_alone(tmp_path):
    path, head = make_published(tmp_path / "model", "qwen3-vl-4b-instruct"), torch.ones(1, 96)
    decoder = [(n, x) for n, x in CheckpointReader(path).tensors() if not n.startswith("lm_head")]
    export_checkpoint(
        [[*decoder, ("score.weight", head)]], tmp_path / "critic", path, "float32", has_values=True
    )
    config = load_config(str(tmp_path / "critic"), flag="--critic-load")
    require_fit(str(tmp_path / "critic"), config, of_critic=True)
    critic = AutoModelForTokenClassification.from_pretrained(tmp_path / "critic")
    assert type(critic).__name__ == "Qwen3ForTokenClassification"
    assert torch.equal(critic.score.weight, head)
    assert torch.equal(critic.model.norm.weight, dict(decoder)["model.norm.weight"])


@pytest.mark.parametrize("name", WHOLE)
def test_every_weight_of_the_trainer_has_one_name_in_the_files(name, tmp_path):
    """Of Qwen3.5, too, before its layers are aligned; its draft layers stay beside the tower."""
    path = make_published(tmp_path, name)
    add(path, {"mtp.norm.weight": torch.ones(96)})
    config, files = load_config(str(path)), stored(path)
    model = matched_model(str(path), config)
    names, own = own_names(files, "it"), []
    for parameter, tensor in model.named_parameters():
        own += stored_tensors(model, parameter, tensor)
    assert sorted(own) == sorted(names) and {stored_name(n, names) for n in own} < files.keys()
    assert "mtp.norm.weight" in CheckpointReader(path).others
    assert stored_name("model.new.weight", names) not in files  # beside the others
    assert own_name(stored_name("model.new.weight", names)) == "model.new.weight"


def add(path, tensors):
    save_file(tensors, path / "model-more.safetensors", {"format": "pt"})
    index = json.loads((path / INDEX).read_text())
    index["weight_map"] |= dict.fromkeys(tensors, "model-more.safetensors")
    (path / INDEX).write_text(json.dumps(index))


def test_sizes_that_a_config_leaves_out_are_those_of_transformers_classes(tmp_path):
    """huggingface/transformers#36683: Gemma3Config has no attribute vocab_size. The published text
    part names four sizes."""
    raw = published("gemma-3-4b-it")
    for size in ("vocab_size", "num_attention_heads", "num_key_value_heads", "head_dim"):
        del raw["text_config"][size]
    write_config(tmp_path, raw)
    config = parse_config(str(tmp_path))
    sizes = config.vocab_size, config.num_attention_heads, config.num_key_value_heads
    assert (*sizes, config.head_dim) == (262_208, 8, 4, 256)
    assert config.eos_token_id == [1, 3] and config.dtype == torch.bfloat16


@pytest.mark.parametrize("ties", [None, True])
def test_a_head_is_not_thrown_away_where_the_whole_is_tied_by_default(ties, tmp_path):
    """vllm-project/vllm#51063: a merge of Mistral-3 whose config.json says that it is tied, and whose
    head is another matrix, answered gibberish."""
    path = make_published(tmp_path, "mistral-small-3.1-24b-instruct")
    if ties is None:
        head = dict(CheckpointReader(path).tensors())["lm_head.weight"]
        assert torch.equal(text_model(path, torch.float32).lm_head.weight, head)
        return
    write_config(path, {**published("mistral-small-3.1-24b-instruct"), "tie_word_embeddings": True})
    rule = "lm_head.weight is stored beside model.embed_tokens.weight with other numbers"
    with pytest.raises(ConfigError, match=rule):
        require_fit(str(path), load_config(str(path)))


def test_a_head_that_was_lost_on_saving_is_missed(tmp_path):
    """QwenLM/Qwen3-VL-Embedding#89: tie_word_embeddings is false, and there is no lm_head.weight."""
    path = make_published(tmp_path, "qwen3-vl-4b-instruct")
    write_config(path, {**published("qwen3-vl-4b-instruct"), "tie_word_embeddings": False})
    with pytest.raises(ConfigError, match=r"needs tensors that it lacks: lm_head\.weight"):
        require_fit(str(path), load_config(str(path)))


def test_names_of_the_whole_beside_a_config_of_the_text_part_are_refused(tmp_path):
    """vllm-project/vllm#15031: a merge saved so was not found by any server."""
    path = make_published(tmp_path, "gemma-3-4b-it")
    raw = published("gemma-3-4b-it")["text_config"]
    write_config(path, {**raw, "architectures": ["Gemma3ForCausalLM"]})
    with pytest.raises(ConfigError, match=r"needs tensors that it lacks: .*model\.embed_tokens"):
        require_fit(str(path), load_config(str(path)))


def test_a_weight_by_both_names_is_refused(tmp_path):
    path = make_published(tmp_path, "gemma-3-4b-it")
    add(path, {"model.language_model.norm.weight": torch.ones(96)})
    with pytest.raises(ConfigError, match=r"language_model\.model\.norm.* names of one weight"):
        load_config(str(path))


def test_files_without_a_text_part_are_refused(tmp_path):
    write_config(tmp_path, published("gemma-3-4b-it"))
    save_file({"vision_tower.x": torch.ones(1)}, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ConfigError, match=r"no tensor is named language_model\.model\.\* or"):
        load_config(str(tmp_path))


def test_numbers_that_are_quantised_are_refused_wherever_the_config_says_so(tmp_path):
    quantised = {"quantization_config": {"quant_method": "fp8"}}
    write_config(tmp_path, {**published("gemma-3-4b-it"), **quantised})
    with pytest.raises(ConfigError, match="quantization_config=fp8"):
        require_alignable(ModelFacts(parse_config(str(tmp_path))), 64)


def test_a_text_part_of_another_kind_is_refused(tmp_path):
    """Ministral 3 scales its queries by their position."""
    raw = published("mistral-small-3.1-24b-instruct")
    raw["text_config"]["model_type"] = "ministral3"
    write_config(tmp_path, raw)
    with pytest.raises(ConfigError, match="model_type=mistral3 is made of several models"):
        parse_config(str(tmp_path))
