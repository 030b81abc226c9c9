"""A tokenizer whose words are the numbers 0 to 63, each its own token."""

from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast


def number_words(end=None):
    """Return the tokenizer; `end` is its end-of-sequence token."""
    inner = Tokenizer(models.WordLevel({str(i): i for i in range(64)}, unk_token="0"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=inner, eos_token=None if end is None else str(end))
