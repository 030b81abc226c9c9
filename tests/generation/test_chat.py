"""A conversation: each answer is that of `odc-mpi generate` to all messages before it."""

import io
import json

import pytest
import transformers
from number_words import number_words
from tiny_qwen2 import QWEN2

from odc_mpi.cli import main as cli

TEMPLATE = "{% for message in messages %}{{ message['content'] }} {% endfor %}"
SIZES = QWEN2 | {"vocab_size": 61, "max_position_embeddings": 24}


@pytest.fixture
def directory(tmp_path):
    config = transformers.AutoConfig.for_model(**SIZES, initializer_range=0.5)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "model")
    tokenizer = number_words(end=60)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(tmp_path / "model")
    return str(tmp_path / "model")


def answers(capsys, monkeypatch, *arguments, lines=""):
    monkeypatch.setattr("sys.stdin", io.StringIO(lines))
    capsys.readouterr()
    assert cli.main([*arguments, "--max-new-tokens", "4"]) == 0
    return capsys.readouterr()


def test_a_conversation(directory, tmp_path, capsys, monkeypatch):
    [first] = answers(capsys, monkeypatch, "generate", directory, "--chat", "3 5").out.splitlines()
    messages = [("user", "3 5"), ("assistant", first), ("user", "7")]
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(json.dumps({"messages": [{"role": role, "content": text} for role, text in messages]}))
    [second] = answers(capsys, monkeypatch, "generate", directory, "--prompts", str(prompts)).out.splitlines()
    long = " ".join(["9"] * 30)
    output = answers(capsys, monkeypatch, "chat", directory, lines=f"3 5\n\n7\n{long}\n3 5")
    assert output.out.splitlines() == [first, second, first]
    assert "max_position_embeddings" in output.err and "a new conversation begins" in output.err
    [system] = answers(capsys, monkeypatch, "chat", directory, "--system", "3", lines="5").out.splitlines()
    assert system == first


def test_parts_of_prompts_that_the_template_leaves_out_are_reported_once(directory, tmp_path, capsys, monkeypatch):
    messages, tools = [{"role": "user", "content": "3 5"}], [{"type": "function", "function": {"name": "add"}}]
    lines = [{"messages": messages}, *2 * [{"messages": messages, "tools": tools}]]
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps(line) + "\n" for line in lines))
    output = answers(capsys, monkeypatch, "generate", directory, "--prompts", str(prompts))
    warnings = [line for line in output.err.splitlines() if "WARNING" in line]
    left_out = "`tools` (the chat template leaves it out) is ignored in 2 of 3 prompts"
    assert warnings == [f"odc_mpi: WARNING: --prompts: {left_out}"]


def test_a_model_without_a_template(directory, tmp_path, capsys):
    (tmp_path / "model" / "chat_template.jinja").unlink()
    assert cli.main(["chat", directory]) == 2
    assert "expected a tokenizer with a chat template" in capsys.readouterr().err
