"""Responses are decoded as the tokenizer decodes them, whatever its kind."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode

from examples.tiny_models import tiny_tokenizer
from reward_loop.verl.samples import ResponseDecoder

pytestmark = pytest.mark.integration  # imports transformers


def byte_level(cls=PreTrainedTokenizerFast, **options):
    """One token a byte, some of several, and added ones: special, plain, and one that nobody counts as special."""
    pairs = ["ab", "Ġthe", "âĢ", "Ģľ", "Ġ."]
    vocabulary = {token: i for i, token in enumerate([*bytes_to_unicode().values(), *pairs])}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    backend.decoder = decoders.ByteLevel()
    tokenizer = cls(tokenizer_object=backend, eos_token="<|end|>", **options)
    tokenizer.add_tokens([AddedToken("<think>"), AddedToken("日本"), AddedToken("<|reserved|>", special=True)])
    return tokenizer


class Shouting(PreTrainedTokenizerFast):
    def _decode(self, *args, **kwargs):
        return super()._decode(*args, **kwargs).upper()


def sentence_pieces():
    backend = Tokenizer(models.BPE(vocab={"▁a": 0, "▁b": 1, "c": 2}, merges=[]))
    backend.decoder = decoders.Metaspace()
    return PreTrainedTokenizerFast(tokenizer_object=backend)


BYTE_LEVEL = byte_level()


@settings(max_examples=300, deadline=None)
@given(st.lists(st.integers(0, len(BYTE_LEVEL) + 3), max_size=40))
async def test_a_table_of_bytes_decodes_as_the_tokenizer_does(ids):
    # Ids beyond the vocabulary too: models have more rows than tokens, and can draw them.
    decoder = ResponseDecoder(BYTE_LEVEL)
    assert await decoder.decode(np.array(ids, dtype=np.int64)) == BYTE_LEVEL.decode(ids, skip_special_tokens=True)


@pytest.mark.parametrize(
    ("tokenizer", "has_table"),
    [
        (tiny_tokenizer(), True),
        (BYTE_LEVEL, True),
        (byte_level(clean_up_tokenization_spaces=True), True),  # which transformers leaves undone for BPE
        (byte_level(Shouting), False),
        (sentence_pieces(), False),
    ],
)
async def test_tokenizers_that_do_more_are_asked_themselves(tokenizer, has_table):
    decoder = ResponseDecoder(tokenizer)
    assert (decoder._bytes is not None) == has_table
    for ids in ([0, 1, 2], [2, 0], list(range(len(tokenizer))) * 20, []):
        text = await decoder.decode(np.array(ids, dtype=np.int64))
        assert text == tokenizer.decode(ids, skip_special_tokens=True)
