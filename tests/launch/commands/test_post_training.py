"""Post-training from start to end, by the commands in docs: a base, chats, adapters, a kill, an export."""

import json
import re
import shutil
from functools import partial

import pytest
import torch
from doc_blocks import blocks
from mpi_launch import ROOT, finish, kill_a_rank_when, start_shell
from transformers import AutoModelForCausalLM

from odc_mpi.checkpoint.manifest import step_name
from odc_mpi.data.dataset.reader import Dataset

pytestmark = [
    pytest.mark.timeout(600),
    pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing.:FutureWarning"),  # of peft itself
]

PAGE = ROOT / "docs" / "start_to_end.md"
#: Steps between checkpoints in jobs/lora.yaml.
EVERY = 20


def commands():
    """The commands of the page, with the sizes of its quick way."""
    (block,) = (block for block in blocks(PAGE) if block.kind == "sh")
    first, *others = (text for text in re.split(r"\n(?=\S)", re.sub(r"^#.*\n", "", block.text, flags=re.MULTILINE)))
    quick = re.search(r"`(STEPS=\d+ EPOCHS=\d+)`", PAGE.read_text())[1]
    assert re.sub(r"\d+", "", first.strip()) == re.sub(r"\d+", "", quick)
    return [f"{quick}\n{command.strip()}" for command in others]


def shell(command, directory):
    """Run a command as a person would."""
    done = finish(start_shell(command, directory, timeout_s=200))
    assert done.code == 0, f"{command}\n{done.out}\n{done.err}"
    return done.out


def scalars(run):
    """The series of a run, by TensorBoard's own reader."""
    reader = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    events = reader.EventAccumulator(str(run / "trackers" / "tensorboard")).Reload()
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


def test_the_page_runs_as_written(tmp_path):
    pytest.importorskip("peft")
    runs, run = tmp_path / "runs", partial(shell, directory=tmp_path)
    (tmp_path / "jobs").symlink_to(ROOT / "jobs")
    prepare_base, train_base, export_base, prepare, train, train_on, export, load_in_peft, take, generate, of_peft = (
        commands()
    )
    for command in (prepare_base, train_base, export_base, prepare):
        run(command)

    # Checkpoints are published while the training continues: on a slow disk the second is the last at the kill.
    job = start_shell(train, tmp_path)
    killed = kill_a_rank_when(job, (runs / "lora" / "checkpoints" / step_name(EVERY)).exists)
    assert killed.code not in (0, 2)
    out = run(train_on)
    assert re.search(rf"resuming from step ({EVERY}|{2 * EVERY}): .* saved on 2 ranks", out), out
    summary = json.loads((runs / "lora" / "summary.json").read_text())
    points, steps = scalars(runs / "lora"), summary["steps"]
    assert [step for step, _ in points["train/loss"]] == list(range(1, steps + 1))
    assert [step for step, _ in points["eval/loss"]] == [*range(0, steps, EVERY), steps]
    losses = [loss for _, loss in points["eval/loss"]]
    assert losses == sorted(losses, reverse=True) and losses[-1] < losses[0] - 0.5
    assert summary["eval_loss"] == pytest.approx(losses[-1])

    run(export)
    assert "default" in run(load_in_peft)
    held_out = Dataset(runs / "data" / "chats.eval.h5")
    assert loss_in_peft(runs / "llama", runs / "adapters", held_out) == pytest.approx(summary["eval_loss"], rel=1e-5)

    for command in (take, generate, of_peft):
        run(command)
    answers = (tmp_path / "answers.jsonl").read_text()
    assert len(answers.splitlines()) == 20
    assert (tmp_path / "answers.of.adapters.jsonl").read_text() == answers

    # The base may move: --base says where it is.
    shutil.move(runs / "llama", runs / "moved")
    elsewhere = generate.replace("--out answers.jsonl", "--out answers.moved.jsonl")
    refused = finish(start_shell(elsewhere, tmp_path))
    assert refused.code == 2 and "with --base" in refused.err
    run(f"{elsewhere} --base runs/moved")
    assert (tmp_path / "answers.moved.jsonl").read_text() == answers
