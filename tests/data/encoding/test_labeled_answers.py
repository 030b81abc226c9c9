"""Answers with labels: which records they are, their tokens as in TRL, their data sets, and what shows them."""

import numpy as np
import pytest
from record_files import write_lines
from user_errors import refused

from odc_mpi.cli import main as cli
from odc_mpi.data import prepare as module
from odc_mpi.data.dataset.format import DamagedDatasetError
from odc_mpi.data.dataset.reader import Dataset, verify_dataset
from odc_mpi.data.dataset.writer import DatasetWriter
from odc_mpi.data.examples import Conversation, ExampleGroup, PromptCompletion
from odc_mpi.data.prepare import PrepareOptions
from odc_mpi.data.prompt_group import read_group
from odc_mpi.data.records.parse import parse_example
from odc_mpi.data.records.schema import ignored_fields
from odc_mpi.data.tokenizer import load_tokenizer

CHAT = {
    "prompt": [{"role": "user", "content": "Is it?"}],
    "completion": [{"role": "assistant", "content": "Yes."}],
}


@pytest.mark.parametrize("label", [True, False, "True", "false"])
def test_a_boolean_label_makes_an_answer_with_a_label(label):
    wanted = label in (True, "True")
    example = parse_example({"prompt": "a ", "completion": "b", "label": label}, "here")
    assert example == ExampleGroup([PromptCompletion("here", "a ", "b")], wanted)
    example = parse_example(CHAT | {"label": label, "tools": []}, "here")
    assert isinstance(example.examples[0], Conversation) and example.label is wanted and example.has_loss
    assert ignored_fields({"prompt": "a ", "completion": "b", "label": label, "x": 1}, {}) == ["x"]


@pytest.mark.parametrize("label", [1, 0, "spam", None, 0.5])
def test_another_label_is_ignored_and_reported(label):
    record = {"prompt": "a ", "completion": "b", "label": label}
    assert parse_example(record, "here") == PromptCompletion("here", "a ", "b")
    assert ignored_fields(record, {}) == ([] if label is None else ["label"])


def test_the_label_may_have_another_name():
    record = {"question": "a ", "answer": "b", "good": False}
    columns = {"prompt": "question", "completion": "answer", "label": "good"}
    assert parse_example(record, "here", columns) == ExampleGroup([PromptCompletion("here", "a ", "b")], False)
    assert ignored_fields(record, columns) == []


@pytest.fixture(scope="module")
def labeled(tmp_path_factory):
    folder = tmp_path_factory.mktemp("labels")
    records = [
        {"prompt": "the sky is", "completion": " blue", "label": True},
        {"prompt": "the sky is", "completion": " lalala lala", "label": False},
        *[
            CHAT | {"completion": [CHAT["completion"][0] | {"content": "lala " * i + "x"}], "label": i % 2 == 0}
            for i in range(9)
        ],
    ]
    source = write_lines(folder / "a.jsonl", *records)
    report = module.prepare([source], folder / "a.h5", PrepareOptions(vocab_size=290, eval_fraction=0.3))
    return records, report


def test_a_prepared_data_set_has_prompts_and_labels(labeled):
    records, report = labeled
    assert report.kind == "labels" and "labeled answers" in report.describe()
    assert f"{report.num_desirable} answers desirable" in report.describe()
    tokenizer, found = load_tokenizer(report.path), []
    for path in (report.path, report.eval_path):
        assert "labeled answers" in verify_dataset(path)
        with Dataset(path) as dataset:
            assert dataset.kind == "labels"
            assert path == report.eval_path or report.num_desirable == dataset.columns["label"].sum()
            for i in range(len(dataset)):
                group = read_group(dataset, i)
                [answer] = group.answers
                assert answer.loss_mask[0], "the first token of an answer has loss"
                text = tokenizer.decode(answer.tokens, skip_special_tokens=True).strip()
                found.append((text, bool(answer.columns["label"])))
                assert tokenizer.decode(group.prompt).strip()
    texts = [
        each["completion"] if isinstance(each["prompt"], str) else each["completion"][0]["content"] for each in records
    ]
    assert sorted(found) == sorted((text.strip(), each["label"]) for text, each in zip(texts, records, strict=True))


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")  # of the libraries of TRL
def test_tokens_are_those_of_trl(labeled):
    trl, datasets = pytest.importorskip("trl"), pytest.importorskip("datasets")
    transformers = pytest.importorskip("transformers")
    records, report = labeled
    tokenizer = load_tokenizer(report.path)
    config = transformers.LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1
    )
    arguments = trl.KTOConfig(
        str(report.path.parent), loss_type="apo_zero_unpaired", use_cpu=True, report_to="none", bf16=False
    )
    rows = []
    for kind in (str, list):  # TRL takes texts or messages, not both
        data = datasets.Dataset.from_list([each for each in records if isinstance(each["prompt"], kind)])
        models = [transformers.LlamaForCausalLM(config) for _ in range(2)]
        rows += trl.KTOTrainer(*models, arguments, train_dataset=data, processing_class=tokenizer).train_dataset
    wanted = sorted((row["prompt_ids"], row["completion_ids"], row["label"]) for row in rows)
    found = []
    for path in (report.path, report.eval_path):
        with Dataset(path) as dataset:
            for i in range(len(dataset)):
                group = read_group(dataset, i)
                [answer] = group.answers
                found.append((group.prompt.tolist(), answer.tokens.tolist(), bool(answer.columns["label"])))
    assert sorted(found) == wanted


def test_show_names_the_label(labeled, tmp_path, capsys):
    source = write_lines(tmp_path / "a.jsonl", *labeled[0][:2])
    command = ["prepare", source, "--out", str(tmp_path / "a.h5"), "--vocab-size", "290", "--show", "2"]
    assert cli.main(command) == 0
    shown = capsys.readouterr().out
    assert "sequence 0: desirable, " in shown and "sequence 1: undesirable, " in shown


@pytest.mark.parametrize(
    ("record", "words"),
    [
        ({"prompt": "", "completion": "b", "label": True}, "expected a prompt, got an empty one"),
        ({"prompt": "a", "completion": "", "label": True}, "no sequences to write"),
    ],
)
def test_records_without_a_prompt_or_an_answer(tmp_path, labeled, record, words):
    source = write_lines(tmp_path / "a.jsonl", record)
    refused(words, module.prepare, [source], tmp_path / "a.h5", PrepareOptions(tokenizer=labeled[1].path))


@pytest.mark.parametrize(("num_prompt", "label"), [(4, 1), (0, 1), (2, 2)])
def test_a_damaged_column_is_found(tmp_path, num_prompt, label):
    with DatasetWriter(tmp_path / "a.h5", vocab_size=9, tokenizer="t", source="s") as writer:
        columns = {"num_prompt_tokens": num_prompt, "label": label}
        writer.append(np.arange(4, dtype=np.uint32), np.arange(4) > 1, columns)
    with pytest.raises(DamagedDatasetError):
        Dataset(tmp_path / "a.h5")


def test_csv(tmp_path, labeled):
    (tmp_path / "a.csv").write_text("prompt,completion,label\nthe sky,blue,True\nthe sky,green,False\n")
    report = module.prepare([str(tmp_path / "a.csv")], tmp_path / "a.h5", PrepareOptions(tokenizer=labeled[1].path))
    with Dataset(report.path) as dataset:
        assert dataset.columns["label"].tolist() == [1, 0]
