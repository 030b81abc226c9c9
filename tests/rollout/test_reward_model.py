"""Reward models as reward functions: the scores of transformers for the tokens of prompt and completion."""

import pytest
import torch
import transformers
from tiny_qwen2 import SIZES
from user_errors import refused

from odc_mpi.data.tokenizer import train_tokenizer
from odc_mpi.errors import UserError
from odc_mpi.models.heads import ENDS_WITH_TURN
from odc_mpi.rollout.rewards import compute_rewards, load_reward_functions

TEXTS = {"prompts": ["the sky is ", "a b "], "completions": ["blue", "c and d and e"]}
CHATS = {
    "prompts": [[{"role": "user", "content": text}] for text in TEXTS["prompts"]],
    "completions": [[{"role": "assistant", "content": text}] for text in TEXTS["completions"]],
}


def write_model(path, auto_class=transformers.AutoModelForSequenceClassification, **changes):
    tokenizer = train_tokenizer(iter(TEXTS["prompts"] * 20), 300)
    torch.manual_seed(1)
    settings = SIZES | {"vocab_size": len(tokenizer), "num_labels": 1, "pad_token_id": tokenizer.pad_token_id} | changes
    model = auto_class.from_config(transformers.AutoConfig.for_model("qwen2", **settings))
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)
    return model.eval(), tokenizer


def rewards(path, arguments):
    [function] = functions = load_reward_functions([str(path)], None)
    assert function.name == path.name
    return compute_rewards(functions, {**arguments, "wanted": [1, 2]}, 0, 0, timeout_s=60.0, skip=False).rewards


def score(model, tokenizer, *texts):
    ids = [token for text in texts for token in tokenizer(text, add_special_tokens=False)["input_ids"]]
    return model(torch.tensor([ids])).logits.item()


def test_texts_end_with_the_end_of_sequence_token(tmp_path):
    model, tokenizer = write_model(tmp_path / "model")
    wanted = [score(model, tokenizer, *each, tokenizer.eos_token) for each in zip(*TEXTS.values(), strict=True)]
    assert rewards(tmp_path / "model", TEXTS).tolist() == pytest.approx(wanted, abs=1e-5)


@pytest.mark.parametrize("ends", [False, True], ids=["as the template", "with the turn"])
def test_chats_end_as_those_that_trained_the_model(tmp_path, ends):
    model, tokenizer = write_model(tmp_path / "model", **{ENDS_WITH_TURN: ends})
    chats = [[*prompt, *completion] for prompt, completion in zip(*CHATS.values(), strict=True)]
    texts = [tokenizer.apply_chat_template(chat, tokenize=False) for chat in chats]
    assert all(text.endswith("<|im_end|>\n") for text in texts)
    wanted = [score(model, tokenizer, text.rstrip() if ends else text) for text in texts]
    assert rewards(tmp_path / "model", CHATS).tolist() == pytest.approx(wanted, abs=1e-5)


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"auto_class": transformers.AutoModelForCausalLM}, "stores no weights for score.weight"),
        ({"num_labels": 3}, "a reward model with one label, got .* with 3"),
        ({"max_position_embeddings": 4}, "at most 4 tokens"),
        ({"pad_token_id": -1}, "expected a padding token, .* has -1"),
        ({"vocab_size": 100}, r"token ids below 100, got (\d+) .* resize_token_embeddings\("),
    ],
)
def test_other_models_and_longer_texts_are_refused(tmp_path, changes, problem):
    write_model(tmp_path / "model", **changes)
    with pytest.raises(UserError, match=problem):
        rewards(tmp_path / "model", TEXTS)


def test_directories_without_a_model_or_a_tokenizer_are_refused(tmp_path):
    refused("config.json, got ... without it: export", load_reward_functions, [str(tmp_path)], None)
    (tmp_path / "config.json").write_text("{}")
    refused("directory of a tokenizer, ...: change rl.reward_funcs", load_reward_functions, [str(tmp_path)], None)


def test_chats_need_a_template_of_the_reward_model(tmp_path):
    write_model(tmp_path / "model")
    (tmp_path / "model" / "chat_template.jinja").unlink()
    refused("/model: 'messages' need a chat template", rewards, tmp_path / "model", CHATS)
