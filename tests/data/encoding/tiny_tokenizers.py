"""Tiny tokenizers of several kinds, trained on a few sentences."""

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

BOS, EOS, UNKNOWN, TURN = "<s>", "</s>", "<unk>", "<|turn|>"
SENTENCES = [
    "Who is there? It is me again, and nobody else. def f(x):\n    return x + 12345\n\nunable to return it",
    "Wer ist da? Ich bin es schon wieder. Größe und Maß, naïve. Question: who? Answer: me.",
    "今日は。誰ですか。私です。 Что это? Это я. 12 345 678",
] * 4
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]


def _bpe(byte_fallback=False, **options):
    return Tokenizer(models.BPE(unk_token=UNKNOWN, fuse_unk=True, byte_fallback=byte_fallback, **options))


def _metaspace(tokenizer, scheme):
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme)
    tokenizer.decoder = decoders.Metaspace(prepend_scheme=scheme)
    return tokenizer


def _llama2():
    """Without a pre-tokenizer: the normalizer inserts "▁" before each text between special tokens."""
    tokenizer = _bpe(byte_fallback=True)
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    steps = (decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0))
    tokenizer.decoder = decoders.Sequence(list(steps))
    return tokenizer


def _gemma():
    tokenizer = _bpe(byte_fallback=True)
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    steps = (decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse())
    tokenizer.decoder = decoders.Sequence(list(steps))
    return tokenizer


def _t5():
    tokenizer = Tokenizer(models.Unigram())
    steps = [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace(prepend_scheme="always")]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    tokenizer.decoder = decoders.Metaspace()
    return tokenizer


def _byte_level(*, add_prefix_space):
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=add_prefix_space)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _word_piece():
    tokenizer = Tokenizer(models.WordPiece(unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.decoder = decoders.WordPiece()
    return tokenizer


def _word_level():
    tokenizer = Tokenizer(models.WordLevel(unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return tokenizer


#: Functions that return untrained tokenizers. Those whose name has "bytes" encode unknown characters as bytes.
KINDS = {
    "unigram, always": lambda: _metaspace(Tokenizer(models.Unigram()), "always"),
    "unigram, first": lambda: _metaspace(Tokenizer(models.Unigram()), "first"),
    "unigram, never": lambda: _metaspace(Tokenizer(models.Unigram()), "never"),
    "bpe, always": lambda: _metaspace(_bpe(), "always"),
    "bpe, first, bytes": lambda: _metaspace(_bpe(byte_fallback=True), "first"),
    "bpe, never": lambda: _metaspace(_bpe(), "never"),
    "llama2, bytes": _llama2,
    "gemma, bytes": _gemma,
    "t5": _t5,
    "byte-level": lambda: _byte_level(add_prefix_space=False),
    "byte-level, prefix": lambda: _byte_level(add_prefix_space=True),
    "wordpiece": _word_piece,
    "words": _word_level,
}


def tiny_tokenizer(kind, *, vocab_size=500):
    """Return a trained tokenizer of a kind, which begins texts with `BOS`."""
    from transformers import PreTrainedTokenizerFast

    tokenizer = KINDS[kind]()
    special = [UNKNOWN, BOS, EOS, TURN, *(BYTES if "bytes" in kind else [])]
    names = {"BPE": "Bpe", "Unigram": "Unigram", "WordPiece": "WordPiece", "WordLevel": "WordLevel"}
    name = names[type(tokenizer.model).__name__]
    options = {"unk_token": UNKNOWN} if name == "Unigram" else {}
    if kind.startswith("byte-level"):
        options["initial_alphabet"] = pre_tokenizers.ByteLevel.alphabet()
    trainer = getattr(trainers, f"{name}Trainer")(
        vocab_size=vocab_size, special_tokens=special, show_progress=False, **options
    )
    splits = tokenizer.pre_tokenizer
    if "bytes" in kind:  # Llama's and Gemma's tokenizers were trained on words, but do not split text themselves
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never")
    tokenizer.train_from_iterator(SENTENCES, trainer)
    tokenizer.pre_tokenizer = splits
    tokenizer.post_processor = processors.TemplateProcessing(single=f"{BOS} $A", special_tokens=[(BOS, 1)])
    names = {"bos_token": BOS, "eos_token": EOS, "unk_token": UNKNOWN, "additional_special_tokens": [TURN]}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, clean_up_tokenization_spaces=False, **names)
