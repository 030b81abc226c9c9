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
    """Return the tokens of each prompt, which are those of the prompt alone, and the tokens of its completion.

    At the beginning of a text, byte-level tokenizers without a prefix use the same tokens as elsewhere, so they
    tokenize completions alone. SentencePiece tokenizers insert a space there, and WordPiece begins a word. With these,
    the completion has the tokens that follow the prompt's in the joined text, as in TRL or, if the prompt and the
    completion share a token there, those that follow another text.
    """
    prompt_ids = tokenize_texts(tokenizer, prompts)
    splitter = tokenizer.backend_tokenizer.pre_tokenizer
    if splitter and b'"add_prefix_space":false' in splitter.__getstate__():  # as in tokenizer.json
        return [prompt_ids, tokenize_texts(tokenizer, completions)]
    ids = _tokenize_after(tokenizer, prompts, prompt_ids, completions)
    for context in _CONTEXTS:
        if not (missing := [i for i, each in enumerate(ids) if each is None]):
            break
        context_ids = tokenize_texts(tokenizer, [context])
        if tokenizer.unk_token_id not in context_ids[0]:  # several unknown characters may become one token
            texts, count = [completions[i] for i in missing], len(missing)
            found = iter(_tokenize_after(tokenizer, [context] * count, context_ids * count, texts))
            ids = [next(found) if each is None else each for each in ids]
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
