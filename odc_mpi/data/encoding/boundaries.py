"""Tokenizing completions as texts that follow their prompts, so that no token contains text from both."""

from collections.abc import Sequence
from typing import Any

#: Texts to put before a completion, of which one is unlikely to share a token with it. The last is before any text.
_CONTEXTS = (":", "a", "")


def tokenize_texts(tokenizer: Any, texts: Sequence[str]) -> list[list[int]]:
    """Tokenize texts, at least one, with a fast tokenizer from transformers, without adding special tokens."""
    batch = tokenizer(texts, add_special_tokens=False, return_attention_mask=False, verbose=False)
    return list(batch["input_ids"])


def tokenize_pairs(tokenizer: Any, prompts: Sequence[str], completions: Sequence[str]) -> list[list[list[int]]]:
    """Return a list of the tokens of all prompts, and a list of the tokens of all completions.

    A prompt has the same tokens as in generation, where nothing follows it. Byte-level tokenizers use the same tokens
    at the beginning of a text as elsewhere, so completions are tokenized alone. SentencePiece tokenizers insert a space
    at the beginning, and WordPiece begins a word. With these tokenizers, prompt and completion are tokenized together,
    as in TRL, and the completion has the tokens after the prompt's. If one token then contains text from both, the
    completion is tokenized after one of `_CONTEXTS` instead of the prompt.
    """
    prompt_ids = tokenize_texts(tokenizer, prompts)
    splitter = tokenizer.backend_tokenizer.pre_tokenizer
    if splitter and b'"add_prefix_space":false' in splitter.__getstate__():  # as in tokenizer.json
        return [prompt_ids, tokenize_texts(tokenizer, completions)]
    ids = _tokenize_after(tokenizer, prompts, prompt_ids, completions)
    for context in _CONTEXTS:
        context_ids = tokenize_texts(tokenizer, [context])
        if tokenizer.unk_token_id not in context_ids[0]:  # several unknown characters may become one token
            for i in (i for i, each in enumerate(ids) if each is None):
                ids[i : i + 1] = _tokenize_after(tokenizer, [context], context_ids, completions[i : i + 1])
    return [prompt_ids, [each or [] for each in ids]]


def _tokenize_after(
    tokenizer: Any, contexts: Sequence[str], context_ids: list[list[int]], texts: Sequence[str]
) -> list[list[int] | None]:
    """Return the tokens of each text after a context, or None if a token contains text from both."""
    joined = tokenize_texts(tokenizer, [context + text for context, text in zip(contexts, texts, strict=True)])
    return [
        ids[len(before) :] if ids[: len(before)] == before else None
        for before, ids in zip(context_ids, joined, strict=True)
    ]
