"""The bytes of tokens, joined, are the UTF-8 of the text, wherever characters are cut."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from onpolicy.agents.gateway.calls import Reply
from onpolicy.agents.gateway.gateway_start import make_gateway
from onpolicy.agents.gateway.parsing import bytes_reader, offsets
from onpolicy.agents.gateway.protocols import chat_completions, completions
from onpolicy.config.groups.agent_flags import GatewayConfig
from tests.support.chat_tokenizers import PLAIN, byte_tokenizer, real_tokenizer

OF_BYTES = [f"<0x{byte:02X}>" for byte in range(256)]


def sentencepiece_tokenizer(*, strips, metaspace=False):
    """A vocabulary of a few words, characters and bytes to fall back on, as Llama-2's or Gemma's."""
    words = ["<unk>", *OF_BYTES, "▁", *"thecaté한", "th", "the", "▁the", "▁▁"]
    merges = [("t", "h"), ("th", "e"), ("▁", "the"), ("▁", "▁")]
    vocabulary = {word: i for i, word in enumerate(words)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, byte_fallback=True))
    spaces = normalizers.Replace(" ", "▁")
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if metaspace:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(split=False)
        steps = [decoders.ByteFallback(), decoders.Metaspace()]
    elif strips:
        spaces = normalizers.Sequence([normalizers.Prepend("▁"), spaces])
        steps.append(decoders.Strip(" ", 1, 0))
    if not metaspace:
        tokenizer.normalizer = spaces
    tokenizer.decoder = decoders.Sequence(steps)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>")
    fast.add_tokens(["<|im_start|>", "<|im_end|>"], special_tokens=True)
    return fast


TOKENIZERS = {
    "byte-level": lambda: byte_tokenizer(PLAIN),
    "bytes to fall back on, first space dropped": lambda: sentencepiece_tokenizer(strips=True),
    "bytes to fall back on": lambda: sentencepiece_tokenizer(strips=False),
    "a decoder of spaces": lambda: sentencepiece_tokenizer(strips=True, metaspace=True),
    "Qwen3": lambda: real_tokenizer("qwen3"),
    "Llama 3.1": lambda: real_tokenizer("llama3_1"),
}


@pytest.fixture(params=TOKENIZERS, scope="module")
def tokenizer(request):
    return TOKENIZERS[request.param]()


WORDS = ["the", " the", "  ", "é", "e\u0301", "한", "語", "\ufffd", "\x00", "\n", "▁"]
EMOJI = [
    "\U0001f469\u200d\U0001f469\u200d\U0001f467", "\U0001f1eb\U0001f1f7", "\U0001f9d1\U0001f3fd",
]  # fmt: skip
PARTS = st.sampled_from([*WORDS, *EMOJI])
TEXTS = st.lists(PARTS | st.text(max_size=3), max_size=8).map("".join)


@settings(deadline=None)
@given(text=TEXTS)
def test_joined_they_are_the_text(tokenizer, text):
    token_ids = tokenizer.encode(text, add_special_tokens=False)
    parts = bytes_reader(tokenizer)(token_ids)
    said = tokenizer.decode(token_ids, clean_up_tokenization_spaces=False)
    assert len(parts) == len(token_ids) and b"".join(parts) == said.encode()


@settings(deadline=None)
@given(text=TEXTS)
def test_offsets_are_the_characters_in_which_tokens_begin(tokenizer, text):
    token_ids = tokenizer.encode(text, add_special_tokens=False)
    parts = bytes_reader(tokenizer)(token_ids)
    before = [b"".join(parts[:i]).decode("utf-8", "ignore") for i in range(len(parts))]
    assert [*offsets(parts)] == [len(text) for text in before]


@settings(deadline=None)
@given(token_ids=st.lists(st.integers(0, 260), max_size=8))
def test_of_any_tokens_there_are_as_many_bytes_as_the_vocabulary_says(tokenizer, token_ids):
    parts = bytes_reader(tokenizer)(token_ids)
    said = tokenizer.decode(token_ids, clean_up_tokenization_spaces=False)
    if "\ufffd" not in said:
        assert b"".join(parts) == said.encode()


def test_a_part_of_a_character_is_its_bytes_and_no_replacement_sign():
    for make in list(TOKENIZERS.values())[:3]:
        tokenizer = make()
        token_ids = tokenizer.encode("語", add_special_tokens=False)[-3:]
        parts = bytes_reader(tokenizer)(token_ids)
        assert parts == [bytes([byte]) for byte in "語".encode()]
        assert [tokenizer.decode([token]) for token in token_ids] == ["\ufffd"] * 3


def test_a_decoder_of_other_steps_gives_each_tokens_own_text():
    tokenizer = sentencepiece_tokenizer(strips=True)
    tokenizer.backend_tokenizer.decoder = decoders.CTC()
    token_ids = tokenizer.encode("the cat", add_special_tokens=False)
    assert bytes_reader(tokenizer)(token_ids) == [
        tokenizer.decode([token]).encode() for token in token_ids
    ]


def test_clients_get_them():
    tokenizer = byte_tokenizer(PLAIN)
    read_bytes = make_gateway(GatewayConfig(), tokenizer, [261], {}).rules.parser.read_bytes
    token_ids = tokenizer.encode("a語b", add_special_tokens=False)
    reply = Reply(
        name="x",
        content="a語b",
        log_probs=[-1.0] * 5,
        token_texts=[tokenizer.decode([token]) for token in token_ids],
        token_bytes=read_bytes(token_ids),
    )
    told = chat_completions.log_probs(reply)["content"]
    assert b"".join(bytes(each["bytes"]) for each in told).decode() == "a語b"
    assert completions._log_probs(reply)["text_offset"] == [0, 1, 1, 1, 2]
