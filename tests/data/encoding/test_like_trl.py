"""Tokens are those of TRL: of texts, except for tokens with text of both prompt and completion; of pairs of DPOTrainer,
except for white space after the end of a turn."""

import copy
import itertools
import json
from importlib.util import find_spec
from types import SimpleNamespace

import pytest
from published_templates import TEXT_TEMPLATES, with_published_template
from tiny_tokenizers import BOS, EOS, KINDS, TURN, tiny_tokenizer
from tokenizers import processors

from odc_mpi.data.encoding.encode import encode, encode_prompts
from odc_mpi.data.encoding.groups import encode_groups
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
    *("me", " me", "  me again ", "\nreturn x\n\n", "ist da. Größe", "誰です", "🙂 ж", "able", "345 "),
    *(f"it{TURN} me", f"{TURN}me"),
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


def tokenize_records(tokenizer, records):
    encoded = encode(tokenizer, [parse_example(record, "here") for record in records])
    return [(each.tokens.tolist(), each.loss_mask.tolist()) for [each] in encoded]


@pytest.mark.parametrize("kind", KINDS)
def test_prompts_and_completions(kind):
    tokenizer = tiny_tokenizer(kind)
    records = [{"prompt": a, "completion": b} for a, b in itertools.product(PROMPTS, COMPLETIONS)]
    prompts = encode_prompts(tokenizer, [parse_example(record, "here") for record in records])
    num_equal = 0
    for record, prompt, ours, theirs in zip(
        records, prompts, tokenize_records(tokenizer, records), tokenize_with_trl(tokenizer, records), strict=True
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
    ours, theirs = tokenize_records(tokenizer, texts), tokenize_with_trl(tokenizer, texts)
    assert [tokens for tokens, _ in ours] == [tokens for tokens, _ in theirs]
    for prompt in PROMPTS[1:]:
        sides = tokenize_records(tokenizer, [{"prompt": prompt, "completion": each} for each in COMPLETIONS])
        for completion, (tokens, _) in zip(COMPLETIONS[1:], sides[1:], strict=True):
            if tokens != sides[0][0]:  # "me" and " me" after a special token
                example = parse_example({"prompt": prompt, "chosen": COMPLETIONS[0], "rejected": completion}, "here")
                [[pair]] = encode_groups(tokenizer, [example])
                assert sides_of(pair)[:2] == [sides[0][0], tokens]


@pytest.mark.parametrize("kind", KINDS)
def test_texts_that_contain_special_tokens(kind):
    """TRL writes the first one twice."""
    tokenizer = tiny_tokenizer(kind)
    records = [{"prompt": f"{BOS}Who is", "completion": f" me{EOS}"}, {"prompt": f"{BOS} Who\n", "completion": "it"}]
    for (tokens, mask), (expected, _) in zip(
        tokenize_records(tokenizer, records), tokenize_with_trl(tokenizer, records), strict=True
    ):
        assert tokens == expected[1:] and mask[0] is False


def prepare_with_trl(tokenizer, records, max_length=None):
    """The tokens of prompt and chosen answer, those of prompt and rejected answer, and the loss masks of both.

    Pairs that truncation makes equal, which TRL keeps, are left out.
    """
    import datasets
    from trl.trainer.dpo_trainer import DataCollatorForPreference, DPOTrainer

    trainer = SimpleNamespace(_tokenizer=tokenizer)
    arguments = SimpleNamespace(dataset_num_proc=None, max_length=max_length, truncation_mode="keep_start")
    dataset = datasets.Dataset.from_list(records)
    prepared = DPOTrainer._prepare_dataset(trainer, dataset, tokenizer, arguments, "train")
    collate = DataCollatorForPreference(pad_token_id=0, max_length=max_length)
    pairs = []
    for batch in (collate.torch_call([example]) for example in prepared):
        lengths = batch["attention_mask"].sum(1).tolist() * 2
        rows = [*batch["input_ids"], *batch["completion_mask"]]
        pairs.append([row[:length].tolist() for row, length in zip(rows, lengths, strict=True)])
    return [pair for pair in pairs if pair[0] != pair[1]]


def encode_records(tokenizer, records, max_length=None):
    """The same of our pairs."""
    encoded = encode_groups(tokenizer, [parse_example(record, "here") for record in records])
    return [sides_of(pair) for [each] in encoded if (pair := each.truncate(max_length)).has_loss]


def sides_of(pair):
    tokens = [[*pair.prompt.tolist(), *answer.tokens.tolist()] for answer in pair.answers]
    return [*tokens, *([False] * len(pair.prompt) + answer.loss_mask.tolist() for answer in pair.answers)]


def assert_alike(tokenizer, records, max_length=None, reference=None):
    ours = encode_records(tokenizer, records, max_length)
    theirs = prepare_with_trl(reference or tokenizer, records, max_length)
    for pair, expected in zip(ours, theirs, strict=True):
        for tokens, mask, all_tokens, all_mask in zip(pair[:2], pair[2:], expected[:2], expected[2:], strict=True):
            assert tokens == all_tokens[: len(tokens)]
            assert mask == list(map(bool, all_mask[: len(mask)]))
            assert not tokenizer.decode(all_tokens[len(tokens) :]).strip()


def message(role, content):
    return {"role": role, "content": content}


USER = message("user", "Is it?")
#: The second begin alike, the third have context, the last a system message.
CHATS = [
    {"prompt": prompt, "chosen": [message("assistant", chosen)], "rejected": [message("assistant", rejected)]}
    for prompt, chosen, rejected in (
        ([USER], "Yes, it is.", "No."),
        ([USER], "I think so.", "I think not"),
        ([USER, message("assistant", "What?"), message("user", "Blue.")], "Very.", "It is 🙂"),
        ([message("system", "Be brief."), USER], "Yes.", "Not at all."),
    )
]
#: Begins with a system message of its own, as that of SmolLM2.
SMOLLM2 = (
    "{% for m in messages %}{% if loop.first and m.role != 'system' %}{{ '<|im_start|>system\nYou help.<|im_end|>\n' }}"
    "{% endif %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def test_conversations_with_published_templates(tokenizer):
    smollm2 = copy.deepcopy(tokenizer)
    smollm2.chat_template = SMOLLM2
    assert_alike(smollm2, CHATS)
    for name in TEXT_TEMPLATES:
        # TRL trains the marker that ends an answer, as we do, only with its training template.
        marked = with_published_template(tokenizer, "glm4moe_training", name) if name == "glm4moe" else None
        records = CHATS[:-1] if name == "gemma" else CHATS
        assert_alike(with_published_template(tokenizer, name), records, reference=marked)
    complete = [{name: record["prompt"] + record[name] for name in ("chosen", "rejected")} for record in CHATS]
    call = {"type": "function", "function": {"name": "f", "description": "It.", "parameters": {"type": "object"}}}
    for name in ("qwen3", "llama3_1"):
        published = with_published_template(tokenizer, name)
        assert_alike(published, complete)
        assert_alike(published, [record | {"tools": json.dumps([call])} for record in CHATS])


@pytest.mark.parametrize("adds_bos", [False, True])
def test_texts(tokenizer, adds_bos):
    tokenizer = copy.deepcopy(tokenizer)
    if adds_bos:
        tokenizer.add_special_tokens({"bos_token": "<s>"})
        tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
            single="<s> $A", special_tokens=[("<s>", tokenizer.bos_token_id)]
        )
    prompts, answers = ("def f(x):", "Is it?\n"), (" return x", "No", "No, it is not.", f"end{tokenizer.eos_token}")
    records = [
        {"prompt": prompt, "chosen": chosen, "rejected": rejected}
        for prompt in prompts
        for chosen, rejected in itertools.permutations(answers, 2)
    ]
    assert_alike(tokenizer, records)
    for max_length in (5, 6, 8, 9):
        assert_alike(tokenizer, records, max_length)
    texts = ["Is it? Yes, it is.", "Is it? No, it is not.", "Is it? No, it is it.", "Is it!", "Is it? Yesterday"]
    texts.append("Is it? Yes")  # the beginning of others
    assert_alike(tokenizer, [{"chosen": a, "rejected": b} for a, b in itertools.permutations(texts, 2)])
