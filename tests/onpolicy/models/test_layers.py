"""Where the decoder layers of a model are."""

from onpolicy.models.layers import decoder_layers
from tests.onpolicy.models.test_policy import load_policy


def test_the_layers_of_a_causal_lm_are_those_of_its_decoder(checkpoint):
    causal_lm = load_policy(checkpoint).causal_lm
    decoder = causal_lm.base_model
    assert decoder_layers(decoder) is decoder_layers(causal_lm) is decoder.layers
