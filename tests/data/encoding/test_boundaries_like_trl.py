"""The tokens of texts are those of TRL, except where a token of TRL contains text of both prompt and completion."""

import itertools
from importlib.util import find_spec
from types import SimpleNamespace

import numpy as np
import pytest
from tiny_tokenizers import BOS, EOS, KINDS, TURN, tiny_tokenizer

from odc_mpi.data.encoding.encode import encode, encode_prompts
from odc_mpi.data.encoding.pairs import encode_pairs
from odc_mpi.data.records.parse import parse_example

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(300),  # for the import of trl
    pytest.mark.skipif(not all(map(find_spec, ("trl", "accelerate", "datasets"))), reason="no trl, accelerate"),
]
PROMPTS = (
    *("", "Who is", "Who is ", "  Who", "Q: x\n", "def f(x):\n    ", "\n", " ", "今日は。", f"{TURN}Who {TURN}", "un"),
    "12",
)
COMPLETIONS = (
    *(
        "me",
        " me",
        "  me again ",
        "\nreturn x\n\n",
        "ist da. Größe",
        "誰です",
        "🙂 ж",
        f"it{TURN} me",
        f"{TURN}me",
        "able",
    ),
    "345 ",
)


def tokenize_with_trl(tokenizer, records):
    """Return the tokens and the loss mask of each record with texts `prompt` and `completion`, or `text`."""
    import datasets
    from trl.trainer.sft_trainer import SFTTrainer

    trainer = SimpleNamespace(_tokenizer=tokenizer, chat_template=None, completion_only_loss="prompt" in records[0])
    options = {"dataset_num_proc": None, "assistant_only_loss": False, "max_length": None, "shuffle_dataset": False}
    arguments = SimpleNamespace(dataset_text_field="text", **options)
    dataset = datasets.Dataset.from_list(records)
    prepared = SFTTrainer._prepare_dataset(trainer, dataset, tokenizer, arguments, False, None, "train")
    return [(each["input_ids"], [label != -100 for label in each["labels"]]) for each in prepared]


def tokenize(tokenizer, records):
    encoded = encode(tokenizer, [parse_example(record, "here") for record in records])
    return [(each.tokens.tolist(), each.loss_mask.tolist()) for [each] in encoded]


@pytest.mark.parametrize("kind", KINDS)
def test_prompts_and_completions(kind):
    tokenizer = tiny_tokenizer(kind)
    records = [{"prompt": a, "completion": b} for a, b in itertools.product(PROMPTS, COMPLETIONS)]
    prompts = encode_prompts(tokenizer, [parse_example(record, "here") for record in records])
    num_equal = 0
    for record, prompt, ours, theirs in zip(
        records, prompts, tokenize(tokenizer, records), tokenize_with_trl(tokenizer, records), strict=True
    ):
        tokens, mask = ours
        assert prompt == tokenizer(record["prompt"])["input_ids"], "TRL's, in GRPO"
        assert tokens[: len(prompt)] == prompt, record
        assert mask == [i >= len(prompt) for i in range(len(tokens))], record
        if kind == "byte-level":
            completion = tokenizer(record["completion"], add_special_tokens=False)["input_ids"]
            assert tokens == [*prompt, *completion, tokenizer.eos_token_id]
        if theirs[0][: len(prompt)] == prompt:
            assert ours == theirs, record
            num_equal += 1
        else:  # a token of TRL's has text of both
            assert kind.startswith("word") or tokenizer.decode(tokens) == tokenizer.decode(theirs[0]), record
    assert num_equal > len(records) / 2


@pytest.mark.parametrize("kind", KINDS)
def test_pairs_and_texts(kind):
    tokenizer = tiny_tokenizer(kind)
    texts = [{"text": text} for text in {a + b for a, b in itertools.product(PROMPTS, COMPLETIONS)}]
    ours, theirs = tokenize(tokenizer, texts), tokenize_with_trl(tokenizer, texts)
    assert [tokens for tokens, _ in ours] == [tokens for tokens, _ in theirs]
    for prompt in PROMPTS[1:]:
        sides = tokenize(tokenizer, [{"prompt": prompt, "completion": each} for each in COMPLETIONS])
        for completion, (tokens, _) in zip(COMPLETIONS[1:], sides[1:], strict=True):
            if tokens != sides[0][0]:  # "me" and " me" after a special token
                example = parse_example({"prompt": prompt, "chosen": COMPLETIONS[0], "rejected": completion}, "here")
                [[pair]] = encode_pairs(tokenizer, [example])
                num_prompt, num_chosen, _ = pair.columns
                prompt_ids, chosen, rejected = np.split(pair.tokens, [num_prompt, num_prompt + num_chosen])
                assert [[*prompt_ids, *chosen], [*prompt_ids, *rejected]] == [sides[0][0], tokens]


@pytest.mark.parametrize("kind", KINDS)
def test_texts_that_contain_special_tokens(kind):
    """TRL writes the first one twice."""
    tokenizer = tiny_tokenizer(kind)
    records = [{"prompt": f"{BOS}Who is", "completion": f" me{EOS}"}, {"prompt": f"{BOS} Who\n", "completion": "it"}]
    for (tokens, mask), (expected, _) in zip(
        tokenize(tokenizer, records), tokenize_with_trl(tokenizer, records), strict=True
    ):
        assert tokens == expected[1:] and mask[0] is False
