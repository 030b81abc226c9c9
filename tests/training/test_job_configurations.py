"""Each configuration in jobs/models is valid, and tells its command and its memory."""

import json
import sys

import pytest
from mpi_launch import ROOT

from odc_mpi.training import settings as configuration

CONFIGURATIONS = sorted((ROOT / "jobs" / "models").glob("*.yaml"))


@pytest.mark.parametrize("path", CONFIGURATIONS, ids=lambda path: path.stem)
def test_a_configuration_is_valid_and_says_what_it_needs(path):
    config = configuration.load(path)
    assert config.model.path and config.model.param_dtype == "bfloat16" and config.run.device == "cuda"
    text = path.read_text()
    assert "Not run here" in text and f"odc-mpi job {path.relative_to(ROOT)} " in text
    assert "Memory per rank, by --dry-run" in text and "GiB" in text


def test_the_reward_of_gsm8k(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "jobs" / "models")
    gsm8k = pytest.importorskip("gsm8k")
    (tmp_path / "in.jsonl").write_text(json.dumps({"question": "1 + 1,233?", "answer": "It is.\n#### 1,234"}) + "\n")
    gsm8k.main(tmp_path / "in.jsonl", tmp_path / "out.jsonl")
    record = json.loads((tmp_path / "out.jsonl").read_text())
    assert record["answer"] == "1234" and record["messages"][0]["content"].startswith("1 + 1,233?")
    chat = [{"role": "assistant", "content": "So #### 1,234."}]
    assert gsm8k.correct_number(["#### 1234", "#### 7", "1234", chat], ["1234"] * 4) == [1.0, 0.1, 0.0, 1.0]
    del sys.modules["gsm8k"]
