"""What `prepare` reports about fields that it does not use, and about the ends of answers."""

import pytest
from record_files import write_lines
from user_errors import says

from odc_mpi.data.encoding.blocks import FilterCounts
from odc_mpi.data.prepare import PrepareOptions, prepare

CHAT = [{"role": "user", "content": "Hi", "mood": "calm"}, {"role": "assistant", "content": "Yes.", "thinking": "Hm."}]
MARKS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}{% generation %}{{ m.content }}"
    "{% endgeneration %}{% else %}{{ m.content }}{% endif %}<|im_end|>\n{% endfor %}"
)


@pytest.fixture
def source(tmp_path):
    records = [{"messages": CHAT, "topic": "a", "id": i} for i in range(3)]
    return write_lines(tmp_path / "a.jsonl", *records, {"messages": [*CHAT[:1], {"role": "assistant", "content": "B"}]})


def test_fields_that_are_not_used_are_counted(source, stdlib_report, tmp_path):
    options = PrepareOptions(tokenizer=stdlib_report.path)
    for _ in range(2):  # the second time from the data set
        text = prepare([source], tmp_path / "a.h5", options).describe()
        lines = [line for line in text.splitlines() if line.startswith("ignored: ")]
        assert lines == [
            "ignored: `mood` of messages (the chat template leaves it out) in 4 lines",
            "ignored: `topic` in 3 lines",
            "ignored: reasoning of messages (the chat template leaves it out) in 3 lines",
        ]
        assert "warning" not in text


def test_no_trained_end_is_a_warning(source, stdlib_report, tmp_path):
    (tmp_path / "marks.jinja").write_text(MARKS)
    options = PrepareOptions(tokenizer=stdlib_report.path, chat_template=tmp_path / "marks.jinja")
    text = prepare([source], tmp_path / "a.h5", options).describe()
    [warning] = [line for line in text.splitlines() if line.startswith("warning: ")]
    says(warning, "--chat-template FILE...such as '<|im_end|>', in 4 lines")


def test_counts_of_blocks_are_added():
    total = FilterCounts(notes={"a": 1}, num_split=2)
    total.add(FilterCounts(notes={"a": 2, "b": 1}, num_split=1))
    assert total == FilterCounts(notes={"a": 3, "b": 1}, num_split=3)
