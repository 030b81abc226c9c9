"""Post-training from one end to the other, as README tells it: a base, chats, adapters, a kill, an export, answers."""

import json
import re

import pytest
import torch
import yaml
from mpi_launch import launch, odc_mpi
from transformers import AutoModelForCausalLM

from odc_mpi.cli.main import main
from odc_mpi.data.dataset import Dataset

pytestmark = [
    pytest.mark.timeout(300),
    pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing.:FutureWarning"),  # of peft itself
]

BASE = {
    "model.config.model_type": "llama",
    "model.config.vocab_size": 300,
    "model.config.hidden_size": 32,
    "model.config.intermediate_size": 64,
    "model.config.num_hidden_layers": 2,
    "model.config.num_attention_heads": 4,
    "model.config.num_key_value_heads": 2,
    "model.config.max_position_embeddings": 128,
    "optim.learning_rate": 0.02,
    "run.steps": 30,
    "run.checkpoint_every": 30,
}
STEPS, EVAL_EVERY, CHECKPOINT_EVERY = 24, 6, 4
DAYS = ["Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday"]


def chat(question, answer):
    return {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}


def write_lines(path, lines):
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def options(settings):
    return [f"--{name}={value}" for name, value in settings.items()]


def prepare(*arguments):
    assert main(["prepare", *map(str, arguments)]) == 0


def export(run, out):
    assert main(["checkpoint", "export", str(run), str(out)]) == 0


@pytest.fixture
def base(tmp_path):
    """A small Llama that has seen the words, as a Hugging Face directory."""
    texts = [{"text": f"{one} is a day, and so is {other}."} for one in DAYS for other in DAYS]
    prepare(write_lines(tmp_path / "texts.jsonl", texts), tmp_path / "texts.h5", "--vocab-size", 300)
    settings = {"data.path": tmp_path / "texts.h5", "run.dir": tmp_path / "base", "run.threads": 1}
    done = odc_mpi(2, "train", *options(BASE | settings))
    assert done.code == 0, done.err
    export(tmp_path / "base", tmp_path / "llama")
    return tmp_path / "llama"


@pytest.fixture
def lora(base, tmp_path):
    """The configuration of adapters over the base, on chats."""
    pairs = [(one, other) for one in range(7) for other in range(7)]
    chats = [chat(f"{DAYS[a]}, {DAYS[b]}?", f"{DAYS[a]} is {abs(a - b)} off {DAYS[b]}.") for a, b in pairs]
    source = write_lines(tmp_path / "chats.jsonl", chats)
    prepare(source, tmp_path / "chats.h5", "--tokenizer", base, "--eval-fraction", 0.2)
    settings = {
        "model": {"path": str(base)},
        "data": {
            "path": str(tmp_path / "chats.h5"),
            "eval_path": str(tmp_path / "chats.eval.h5"),
            "max_tokens_per_microbatch": 512,
        },
        "lora": {"r": 4, "alpha": 16},
        "optim": {"learning_rate": 0.01, "lr_scheduler_type": "constant"},
        "run": {
            "dir": str(tmp_path / "lora"),
            "threads": 1,
            "report_to": "tensorboard",
            "steps": STEPS,
            "eval_every": EVAL_EVERY,
            "eval_on_start": True,
            "checkpoint_every": CHECKPOINT_EVERY,
        },
    }
    path = tmp_path / "lora.yaml"
    path.write_text(yaml.safe_dump(settings))
    return path


def killed_at(step, config, script):
    """Train on two ranks, of which one is killed after a step."""
    script.write_text(
        "import os, signal, sys\n"
        "from odc_mpi.cli import main as cli\n"
        "from odc_mpi.train.rundir.saving import Saving\n"
        "saves = Saving.after_step\n"
        "def after_step(self, step):\n"
        "    saves(self, step)\n"
        f"    if step.number == {step} and self._world.rank == 1:\n"
        "        os.kill(os.getpid(), signal.SIGKILL)\n"
        "Saving.after_step = after_step\n"
        "sys.exit(cli.main(sys.argv[1:]))\n"
    )
    return launch(2, script, "train", "--config", config)


def scalars(run):
    """The series of a run, by TensorBoard's own reader."""
    reader = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    (path,) = (run / "trackers" / "tensorboard").iterdir()
    events = reader.EventAccumulator(str(path)).Reload()
    return {tag: [(point.step, point.value) for point in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


def loss_in_peft(base, adapters, dataset):
    """The mean loss of the trained tokens, by transformers and peft, sequence after sequence."""
    peft = pytest.importorskip("peft")
    model = peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), adapters).eval()
    total, count = 0.0, 0
    for index in range(len(dataset)):
        tokens, trained = map(torch.from_numpy, dataset[index])
        labels = torch.where(trained, tokens, -100)[1:]
        with torch.no_grad():
            logits = model(input_ids=tokens[None]).logits[0, :-1]
        total += torch.nn.functional.cross_entropy(logits, labels, reduction="sum").item()
        count += int((labels != -100).sum())
    return total / count


def generated(ranks, source, prompts, out):
    done = odc_mpi(ranks, "generate", source, "--prompts", prompts, "--max-new-tokens", 12, "--out", out)
    assert done.code == 0, done.err
    return [json.loads(line) for line in out.read_text().splitlines()]


def test_from_a_base_to_completions(base, lora, tmp_path):
    run, adapters = tmp_path / "lora", tmp_path / "adapters"
    assert killed_at(14, lora, tmp_path / "killed.py").code not in (0, 1, 2)
    assert [step for step, _ in scalars(run)["train/loss"]][-1] >= 12

    done = odc_mpi(3, "train", "--config", lora)
    # A checkpoint is complete some time after its step.
    assert done.code == 0 and re.search(r"resuming after step (8|12), .* saved by 2 ranks", done.out), done
    points = scalars(run)
    assert [step for step, _ in points["train/loss"]] == list(range(1, STEPS + 1))
    assert [step for step, _ in points["eval/loss"]] == list(range(0, STEPS + 1, EVAL_EVERY))
    losses = [loss for _, loss in points["eval/loss"]]
    assert losses[-1] < losses[0] - 0.5
    summary = json.loads((run / "summary.json").read_text())
    assert summary["eval_loss"] == pytest.approx(losses[-1])

    export(run, adapters)
    held_out = Dataset(tmp_path / "chats.eval.h5")
    assert loss_in_peft(base, adapters, held_out) == pytest.approx(summary["eval_loss"], rel=1e-5)

    prompts = write_lines(tmp_path / "prompts.jsonl", [chat(f"{day}, Friday?", "not to be seen") for day in DAYS[:3]])
    of_run = generated(2, run, prompts, tmp_path / "run.jsonl")
    assert generated(0, adapters, prompts, tmp_path / "adapters.jsonl") == of_run
    assert generated(0, base, prompts, tmp_path / "base.jsonl") != of_run
