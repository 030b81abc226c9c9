"""`prepare` with chat templates: another template, one sequence per answer, bad lines, and the display of sequences."""

import io

import pytest
from record_files import write_lines
from rich.console import Console
from user_errors import refused

from odc_mpi.cli import main as cli
from odc_mpi.data.dataset.format import ADDITIONAL_TEMPLATES
from odc_mpi.data.dataset.reader import Dataset
from odc_mpi.data.encoding.encode import encode_prompts
from odc_mpi.data.examples import Conversation
from odc_mpi.data.prepare import PrepareOptions, eval_output_path, prepare
from odc_mpi.data.show import show_sequences
from odc_mpi.data.tokenizer import load_tokenizer, train_tokenizer

THINKING = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}{% if loop.last and m.role == 'assistant' %}"
    "{{ '<think>\n\n' }}{% endif %}{{ m.content.split('</think>')[-1] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n<think>\n' }}{% endif %}"
)


def make_chat(*contents):
    roles = ("user", "assistant") * len(contents)
    return {"messages": [{"role": role, "content": text} for role, text in zip(roles, contents, strict=False)]}


def conversation(i):
    return make_chat(f"Is {i} 0?", f"No, {i}.", f"Is {i} 1?", f"No, {i}.")


@pytest.fixture
def source(tmp_path):
    chats = [*(conversation(i) for i in range(40)), make_chat("?", "Hm.</think>No."), make_chat("Is 40 0?", "No, 40.")]
    return write_lines(tmp_path / "a.jsonl", *chats)


@pytest.fixture
def template(tmp_path):
    path = tmp_path / "thinking.jinja"
    path.write_text(THINKING)
    return path


def texts(path):
    tokenizer = load_tokenizer(path)
    with Dataset(path) as dataset:
        return [tokenizer.decode(dataset[i][0]) for i in range(len(dataset))]


def test_another_template_is_stored_and_splits_conversations(source, template, tmp_path):
    out = tmp_path / "a.h5"
    options = PrepareOptions(vocab_size=300, chat_template=template, bad_lines="skip", eval_fraction=0.3)
    report = prepare([source], out, options)
    assert (report.num_sequences + report.num_eval_sequences, report.num_bad_lines) == (81, 1)
    assert report.notes == {"one sequence for each answer (--split-turns)": 40}
    lines = report.describe().splitlines()
    assert "one sequence for each answer (--split-turns) in 40 lines" in lines
    assert any(f"trained on {source}, with {template}, stored in" in line for line in lines)
    assert "line 41: the chat template drops a part of message 2" in lines[-1] and "--chat-template" in lines[-1]
    # Both sequences of a conversation are on the same side.
    sides = [{text.split("Is ")[1].split()[0] for text in texts(path)} for path in (out, eval_output_path(out))]
    assert sides[0].isdisjoint(sides[1]) and len(sides[0]) + len(sides[1]) == 41
    tokenizer = load_tokenizer(out)
    assert tokenizer.chat_template == THINKING
    prompt = tokenizer.decode(encode_prompts(tokenizer, [Conversation("", make_chat("Is 1 0?")["messages"])])[0])
    assert prompt == "<|im_start|>user\nIs 1 0?<|im_end|>\n<|im_start|>assistant\n<think>\n"
    template.write_text(THINKING + " ")
    assert prepare([source], out, options).elapsed_s is not None, "another template"


@pytest.mark.parametrize("num_proc", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_additional_templates_are_used_and_stored(tmp_path, num_proc):
    """Hugging Face tokenizers use the template `tool_use` if there are tools."""
    tokenizer = train_tokenizer(["Is 1 0? No, 1."], 300)
    plain = "{% for m in messages %}{{ m.role + m.content }}{% endfor %}"
    tokenizer.chat_template = {"default": plain, "tool_use": f"{{{{ tools[0].function.name }}}}{plain}"}
    tokenizer.save_pretrained(tmp_path / "model")
    assert [path.name for path in (tmp_path / "model" / ADDITIONAL_TEMPLATES).iterdir()] == ["tool_use.jinja"]
    tools = [{"type": "function", "function": {"name": "add", "parameters": {}}}]
    lines = write_lines(tmp_path / "a.jsonl", make_chat("1", "2") | {"tools": tools}, make_chat("1", "2"))
    prepare([lines], tmp_path / "a.h5", PrepareOptions(tokenizer=tmp_path / "model", num_proc=num_proc))
    prepare([lines], tmp_path / "b.h5", PrepareOptions(tokenizer=tmp_path / "a.h5"))
    for path in (tmp_path / "a.h5", tmp_path / "b.h5"):
        assert texts(path) == ["adduser1assistant2", "user1assistant2"]
        assert load_tokenizer(path).chat_template == tokenizer.chat_template
    other = PrepareOptions(tokenizer=tmp_path / "a.h5", chat_template=tmp_path / "plain.jinja", num_proc=num_proc)
    (tmp_path / "plain.jinja").write_text(plain)
    prepare([lines], tmp_path / "c.h5", other)
    assert load_tokenizer(tmp_path / "c.h5").chat_template == plain
    assert texts(tmp_path / "c.h5") == ["user1assistant2"] * 2


def test_the_report_names_a_generation_prompt_that_answers_lack(source, template, tmp_path):
    template.write_text(THINKING.replace("'<think>\n\n'", "''").replace(".split('</think>')[-1]", ""))
    for split_turns, number in (("auto", 42), ("always", 82), ("never", 42)):
        options = PrepareOptions(vocab_size=300, chat_template=template, split_turns=split_turns)
        report = prepare([source], tmp_path / "a.h5", options)
        assert report.num_sequences == number
        assert r"the chat template leaves '<think>\n' out of answers, in 42 lines" in report.describe()


def test_a_template_that_cannot_be_read(source, tmp_path):
    binary = tmp_path / "binary"
    binary.write_bytes(b"\xff")
    broken = tmp_path / "broken.jinja"
    broken.write_text("a\n{% for")
    for path, words in (
        *((path, f"as --chat-template, got '{path}'") for path in (tmp_path / "none.jinja", tmp_path, binary)),
        (broken, "--chat-template: expected a Jinja template, got ... in line 2: "),
    ):
        options = PrepareOptions(vocab_size=300, chat_template=path)
        refused(words, prepare, [source], tmp_path / "a.h5", options)


def test_show_marks_the_loss(tmp_path, capsys):
    pair = {"prompt": "Say ä\x1b", "completion": " [b]ä[/b]"}
    source = write_lines(tmp_path / "a.jsonl", conversation(1), pair, {"text": "Only 🙂"}, conversation(2))
    command = ["prepare", source, "--out", str(tmp_path / "a.h5"), "--vocab-size", "280", "--show", "3"]
    outputs = []
    for _ in range(2):  # the second finds the data set
        assert cli.main(command) == 0
        outputs.append(capsys.readouterr().out.partition("\nsequence 0: "))
    assert outputs[0][2] == outputs[1][2] and "up to date" in outputs[1][0]
    chat, pair, text = outputs[0][2].split("\nsequence ")
    assert chat.partition("\n")[2] == (
        "<|im_start|>user\nIs 1 0?<|im_end|>\n<|im_start|>assistant\n[[No, 1.<|im_end|>]]\n"
        "<|im_start|>user\nIs 1 1?<|im_end|>\n<|im_start|>assistant\n[[No, 1.<|im_end|>]]\n\n"
    )
    assert pair.partition("\n")[2] == "Say ä\\x1b[[ [b]ä[/b]<|endoftext|>]]\n"
    assert text.partition("\n")[2].replace("[[", "") == "Only 🙂<|endoftext|>]]\n" and "[[" in text
    terminal = Console(file=io.StringIO(), force_terminal=True, color_system="standard", width=200)
    show_sequences(tmp_path / "a.h5", range(1), terminal)
    shown = terminal.file.getvalue()
    assert "assistant\n\x1b[1;32mNo, 1.<|im_end|>\x1b[0m\n" in shown and "[[" not in shown
