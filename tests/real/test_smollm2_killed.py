"""SmolLM2-135M-Instruct trained in full by commands: killed after a checkpoint, resumed, exported, and asked."""

import pytest
import torch
import transformers
import yaml
from crash_cases import CrashedRun, Start
from mpi_launch import ROOT, odc_mpi
from small_run import losses

SMOLLM2 = ROOT / "runs" / "smollm2"
CHAT = [{"role": "user", "content": "What is the capital of France?"}]


@pytest.mark.timeout(900)
def test_a_killed_run_resumes_and_its_export_answers_in_transformers(tmp_path):
    """Steps after the newest checkpoint are done twice, with the same losses."""
    data, out, config = tmp_path / "chats.h5", tmp_path / "model", tmp_path / "config.yaml"
    assert odc_mpi(0, "prepare", ROOT / "jobs" / "chats.jsonl", "--out", data, "--tokenizer", SMOLLM2).code == 0
    settings = {
        "model": {"path": str(SMOLLM2)},
        "data": {"path": str(data), "minibatch_sequences": 5},
        "optim": {"learning_rate": 1e-5, "lr_scheduler_type": "constant"},
        "run": {"dir": str(tmp_path / "run"), "device": "cpu", "resume": "auto"},
    }
    config.write_text(yaml.safe_dump(settings))
    run = CrashedRun(config, every=2, timeout_s=600)
    run.endure([Start(2, "checkpoint")])
    before = losses(run.directory)
    run.happen(run.begin(2, "--run.steps", run.seen + 1), "end")
    assert losses(run.directory)[:-1] == pytest.approx(before, rel=1e-5)

    assert odc_mpi(0, "export", run.directory, "--out", out).code == 0
    tokenizer = transformers.AutoTokenizer.from_pretrained(out)
    model = transformers.AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)
    prompt = tokenizer.apply_chat_template(CHAT, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    completion = model.generate(**prompt, max_new_tokens=24, do_sample=False)[0, prompt["input_ids"].shape[1] :]
    assert tokenizer.decode(completion) == "The capital of France is Paris.<|im_end|>"
