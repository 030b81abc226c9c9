"""SmolLM2-135M-Instruct trained in full by commands: killed after a checkpoint, resumed, exported, and asked."""

import json
import os
import signal
from pathlib import Path

import pytest
import torch
import transformers
from mpi_launch import end_all, odc_mpi, start
from processes import descendants, is_python

SMOLLM2 = Path(__file__).parents[2] / "runs" / "smollm2"
CHAT = [{"role": "user", "content": "What is the capital of France?"}]


def recorded(run):
    return {line["step"]: line["loss"] for line in map(json.loads, (run / "metrics.jsonl").read_text().splitlines())}


@pytest.mark.timeout(900)
def test_a_killed_run_resumes_and_its_export_answers_in_transformers(tmp_path):
    """Step 3 is done twice, with the same loss: before the kill, and from the checkpoint of step 2."""
    data, run, out = tmp_path / "chats.h5", tmp_path / "run", tmp_path / "model"
    chats = SMOLLM2.parents[1] / "jobs" / "chats.jsonl"
    assert odc_mpi(0, "prepare", chats, "--out", data, "--tokenizer", SMOLLM2).code == 0
    settings = {"model.path": SMOLLM2, "data.path": data, "data.minibatch_sequences": 5, "run.dir": run}
    settings |= {"optim.learning_rate": 1e-5, "optim.lr_scheduler_type": "constant", "run.device": "cpu"}
    settings |= {"run.steps": 4, "run.checkpoint_every": 2, "run.resume": "auto"}
    command = ["train", *(word for name, value in settings.items() for word in (f"--{name}", value))]
    process = start(2, "-m", "odc_mpi", *command)
    try:
        assert any(" 3/4" in f" {line}" for line in process.stdout), process.stderr.read()
        os.kill(min(pid for pid, words in descendants(process.pid).items() if is_python(words)), signal.SIGKILL)
        process.communicate(timeout=120)
    finally:
        end_all()
    before = recorded(run)
    assert list(before) == [1, 2, 3]
    assert odc_mpi(2, *command, timeout_s=600).code == 0
    after = recorded(run)
    assert list(after) == [1, 2, 3, 4] and after[3] == pytest.approx(before[3], rel=1e-5)

    assert odc_mpi(0, "export", run, "--out", out).code == 0
    tokenizer = transformers.AutoTokenizer.from_pretrained(out)
    model = transformers.AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)
    prompt = tokenizer.apply_chat_template(CHAT, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    completion = model.generate(**prompt, max_new_tokens=24, do_sample=False)[0, prompt["input_ids"].shape[1] :]
    assert tokenizer.decode(completion) == "The capital of France is Paris.<|im_end|>"
