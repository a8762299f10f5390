"""A decoder with a vision tower computes what transformers' whole model does, to the same bits in
any company."""

import io

import numpy as np
import pytest
import torch
from PIL import Image
from torch.distributed._composable import checkpoint
from transformers import AutoModelForImageTextToText

from onpolicy.errors import ContractError
from onpolicy.images.pixels import PixelReader
from onpolicy.models.vision import seeing
from onpolicy.models.vision.seeing import SequencePart, sight_of
from tests.support.seeing_policies import FAMILIES, log_probs, packed, prompt_with, seeing_policy
from tests.support.tiny_images import make_image_checkpoint, picture


@pytest.fixture(scope="module", params=FAMILIES)
def path(request, tmp_path_factory):
    return make_image_checkpoint(tmp_path_factory.mktemp("seeing") / "model", request.param)


def whole_log_probs(path, tokens, images):
    """The log-probabilities of tokens from 4 on, with gradient, and their model: transformers' whole."""
    model = AutoModelForImageTextToText.from_pretrained(path, dtype=torch.float32).eval()
    ids, read = torch.tensor([tokens]), PixelReader(path)
    pixels, kinds = [read(image.data) for image in images], torch.zeros_like(ids)
    for image in images:
        kinds[0, image.start : image.end] = 1
    seen = {"mm_token_type_ids" if read.family.axis_sections else "token_type_ids": kinds}
    if pixels:
        seen["pixel_values"] = torch.cat([each.values for each in pixels])
    if pixels and read.family.axis_sections:
        seen["image_grid_thw"] = torch.tensor([each.grid for each in pixels])
    logits = model(input_ids=ids, attention_mask=torch.ones_like(ids), **seen).logits[0]
    return logits.log_softmax(-1)[3:-1].gather(1, ids[0, 4:, None])[:, 0], model


def test_it_computes_what_the_whole_model_computes(path):
    policy = seeing_policy(path)
    for images in ([picture()], [picture(1, (40, 24)), picture(2)], []):
        tokens, placed = prompt_with(path, *images, text=range(5, 40))
        (found,) = log_probs(policy, (tokens, placed))
        expected, _ = whole_log_probs(path, tokens, placed)
        assert (found - expected).abs().max() < 2e-4


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_no_bit_depends_on_the_company_or_on_threads(path, dtype):
    prompts = [
        prompt_with(path, picture(0), text=(5, 6, 7)),
        prompt_with(path, picture(1, (48, 32)), picture(0), text=range(5, 60), seed=1),
        prompt_with(path, text=range(9, 30)),
        prompt_with(path, picture(2), text=range(5, 9), seed=2),
    ]
    policy, other = (seeing_policy(path, dtype, threads) for threads in (1, 2))
    alone = [log_probs(policy, prompt)[0] for prompt in prompts]
    together = log_probs(other, *prompts[::-1])[::-1]
    assert all(torch.equal(a, b) for a, b in zip(alone, together, strict=True))


def test_every_image_counts_where_it_stands(path):
    """Controls: one patch of another picture, another size, two pictures swapped."""
    policy = seeing_policy(path, torch.bfloat16)
    one, two = picture(0), picture(1)
    (expected,) = log_probs(policy, prompt_with(path, one, two))
    patched = np.array(Image.open(io.BytesIO(one)))
    patched[:8, :8] = 255 - patched[:8, :8]
    file = io.BytesIO()
    Image.fromarray(patched).save(file, "PNG")
    for images in ((file.getvalue(), two), (two, one)):
        (other,) = log_probs(policy, prompt_with(path, *images))
        assert not torch.equal(other, expected)
    if PixelReader(path).family.rows_of_each is None:
        assert len(prompt_with(path, picture(0, (48, 16)), two)[0]) != len(
            prompt_with(path, one, two)[0]
        )


def test_rows_of_a_text_do_not_depend_on_images_of_others(path):
    policy = seeing_policy(path)
    text, seen = prompt_with(path, text=range(5, 40)), prompt_with(path, picture())
    assert torch.equal(log_probs(policy, seen, text)[1], log_probs(policy, text)[0])


def test_positions_of_text_alone_would_give_other_bits(tmp_path, monkeypatch):
    path = make_image_checkpoint(tmp_path, "qwen3_vl")
    prompt = prompt_with(path, picture(0, (32, 32)), picture(1, (32, 32)))
    (expected,) = log_probs(seeing_policy(path), prompt)
    plain = seeing.axis_positions
    monkeypatch.setattr(seeing, "axis_positions", lambda first, n, images: plain(first, n, []))
    assert not torch.equal(log_probs(seeing_policy(path), prompt)[0], expected)


def test_causal_attention_within_an_image_would_give_other_bits(tmp_path, monkeypatch):
    path = make_image_checkpoint(tmp_path, "gemma3")
    prompt = prompt_with(path, picture())
    (expected,) = log_probs(seeing_policy(path), prompt)
    monkeypatch.setattr(seeing.Sight, "attention", lambda *_: None)
    assert not torch.equal(log_probs(seeing_policy(path), prompt)[0], expected)


def test_gradients_are_those_of_the_whole_model(path):
    tokens, placed = prompt_with(path, picture(0), picture(1, (32, 32)), text=range(5, 40))
    policy = seeing_policy(path)
    policy(packed((tokens, placed))).log_probs.sum().backward()
    log_probs_of_whole, model = whole_log_probs(path, tokens, placed)
    log_probs_of_whole.sum().backward()
    expected = {name: parameter.grad for name, parameter in model.named_parameters()}
    compared = 0
    for name, parameter in policy.causal_lm.named_parameters():
        own = name.replace(".tower.", ".")
        own = own if own in expected else own.replace("model.", "model.language_model.", 1)
        if (wanted := expected[own]) is not None:
            # The gradient of a key's bias is zero, but for rounding.
            assert (parameter.grad - wanted).abs().max() < 2e-3 * wanted.abs().max() + 1e-6, name
            compared += 1
    assert compared > 30


def test_pixels_of_another_processor_are_refused(path):
    tokens, (placed,) = prompt_with(path, picture())
    policy = seeing_policy(path)
    other = type(placed)(placed.start, placed.end, picture(3), placed.digest)
    with pytest.raises(ValueError, match=r"image at token 3: its pixels .* the same checkpoint"):
        log_probs(policy, (tokens, (other,)))


def test_a_pass_with_part_of_an_image_is_refused_where_its_tokens_see_each_other(tmp_path):
    path = make_image_checkpoint(tmp_path, "gemma3")
    tokens, placed = prompt_with(path, picture())
    sight = sight_of(seeing_policy(path).causal_lm.base_model)
    with pytest.raises(
        ContractError, match=r"a pass has 2 of its 4 tokens.*--chunked-prefill-size -1"
    ):
        sight.embed(torch.tensor(tokens[:5]), [SequencePart(0, 5, placed)])


def test_activations_that_are_computed_again_change_no_bit_of_a_gradient(path):
    prompt = prompt_with(path, picture(0), picture(1, (32, 32)))
    gradients = []
    for computes_again in (False, True):
        policy = seeing_policy(path)
        for layer in policy.layers if computes_again else ():
            checkpoint(layer)
        policy(packed(prompt)).log_probs.sum().backward()
        gradients.append({name: p.grad for name, p in policy.named_parameters()})
    for name, gradient in gradients[0].items():
        assert (gradient is None) == (gradients[1][name] is None)
        assert gradient is None or torch.equal(gradient, gradients[1][name]), name
