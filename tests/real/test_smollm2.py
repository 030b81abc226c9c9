"""SmolLM2-135M-Instruct against peft and plain transformers: losses, export, generation, chat template, resume.

The largest launch has three ranks; trainings on fewer run on a part of them. The model is in runs/smollm2, where
`make test-models` writes it.
"""

import itertools
import json
import shutil
from pathlib import Path

import peft
import pytest
import torch
import torch_reference
import transformers
from mpi4py import MPI
from peak_memory import estimated_and_measured
from small_training import configure, on_first_rank, train_to_the_end

from odc_mpi.cli.main import main
from odc_mpi.data.dataset.reader import Dataset
from odc_mpi.generation.generate import SamplingParams
from odc_mpi.generation.load import GenerateArguments
from odc_mpi.generation.run import generate_all
from odc_mpi.runtime.world import World
from odc_mpi.training import settings as configuration
from odc_mpi.training.inputs import open_inputs

pytestmark = [
    pytest.mark.mpi,
    pytest.mark.timeout(900),
    pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing.:FutureWarning"),  # of peft itself
]

SLOW = pytest.mark.slow
ROOT = Path(__file__).parents[2]
SMOLLM2 = ROOT / "runs" / "smollm2"
#: Of each training: a launch with two ranks is the short one.
STEPS = 5 if MPI.COMM_WORLD.size > 2 else 2
KINDS = {"lora": {"lora.r": 16, "lora.alpha": 32, "optim.learning_rate": 5e-4}, "full": {"optim.learning_rate": 1e-5}}
CHAT = [{"role": "user", "content": "What is the capital of France?"}]
SAMPLING = SamplingParams(max_new_tokens=24)
#: By kind: losses of the plain loop and its trained model.
_references = {}


@pytest.fixture(scope="module")
def world():
    with World(timeout_s=600) as made:
        yield made


@pytest.fixture(scope="module")
def folder(world, tmp_path_factory):
    """A directory that all ranks see, with chats that `prepare` has encoded, and a prompt."""
    path = world.gather_objects(tmp_path_factory.mktemp("smollm2"))[0]
    (path / "prompts.jsonl").write_text(json.dumps({"messages": CHAT}))
    command = ["prepare", ROOT / "jobs" / "chats.jsonl", "--out", path / "chats.h5", "--tokenizer", SMOLLM2]
    on_first_rank(world, lambda: main([str(word) for word in command]))
    return path


def settings(folder, kind, **changes):
    usual = {
        "model.path": SMOLLM2,
        "data.minibatch_sequences": 5,
        "data.max_tokens_per_microbatch": 128,
        "optim.adam_epsilon": 1e-5,
        "optim.lr_scheduler_type": "constant",
        "run.dir": folder / "run",
        "run.steps": STEPS,
        "run.resume": "auto",
    }
    return configure(folder / "chats.h5", **{**usual, **KINDS[kind], **changes})


def reference(folder, kind):
    """Train in a plain loop, and return the losses and the model."""
    if kind not in _references:
        config = settings(folder, kind)
        inputs = open_inputs(config, 0, 1)
        model = transformers.AutoModelForCausalLM.from_pretrained(SMOLLM2, dtype=torch.float32)
        if config.lora.r:
            lora = {"r": config.lora.r, "lora_alpha": config.lora.alpha, "target_modules": config.lora.target_modules}
            model = torch_reference.with_adapters(model, inputs.model.weights, **lora)
        minibatches = [minibatch.indices for minibatch in itertools.islice(inputs.loader, STEPS)]
        _references[kind] = torch_reference.train(model, inputs.dataset, minibatches, config.optim), model
    return _references[kind]


def train(world, ranks, config):
    """Train on the first ranks, and return the losses on them."""
    color = 0 if world.rank < ranks else MPI.UNDEFINED
    part = world.comm.Split(color)
    losses = None
    if part != MPI.COMM_NULL:
        with World(part, job=world.job) as among:
            lines, _ = train_to_the_end(config, among)
        part.Free()
        losses = [line["loss"] for line in lines]
    world.gather_objects(None)
    return losses


def ask(model):
    """Return the greedy answer of a model of transformers, as tokens."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(SMOLLM2)
    prompt = tokenizer.apply_chat_template(CHAT, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    limits = {"max_new_tokens": SAMPLING.max_new_tokens, "do_sample": False}
    return model.eval().generate(**prompt, **limits)[0, prompt["input_ids"].shape[1] :].tolist()


def test_the_chat_template(world, folder):
    def compare():
        tokenizer = transformers.AutoTokenizer.from_pretrained(SMOLLM2)
        dataset = Dataset(folder / "chats.h5")
        tokens, trained = dataset[0]
        question, answer = "Which day comes after Monday?", "The day after Monday is Tuesday."
        chat = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
        assert tokenizer.decode(tokens).rstrip() == tokenizer.apply_chat_template(chat, tokenize=False).rstrip()
        assert tokenizer.decode(tokens[trained]) == answer + "<|im_end|>"

    on_first_rank(world, compare)


@pytest.mark.parametrize("ranks", [pytest.param(1, marks=SLOW), 2, pytest.param(3, marks=SLOW)])
@pytest.mark.parametrize("kind", KINDS)
def test_losses(world, folder, kind, ranks):
    config = settings(folder, kind)
    losses = train(world, ranks, config)

    def compare():
        assert losses == pytest.approx(reference(folder, kind)[0], rel=2e-5)
        shutil.rmtree(config.run.dir)

    on_first_rank(world, compare)


@pytest.mark.parametrize("kind", [pytest.param("full", marks=SLOW), "lora"])
def test_a_dry_run_estimates_the_peak_within_a_fifth(world, folder, kind):
    """Of a run in one process, beside the ranks of this one, which wait."""

    def compare():
        changes = {"run.steps": 2, "run.dir": folder / kind, "data.max_tokens_per_microbatch": 512}
        path = folder / f"{kind}.yaml"
        path.write_text(configuration.dump(settings(folder, kind, **changes)))
        total, peak = estimated_and_measured(path)
        print(f"{kind}: {total >> 20:,} MiB estimated, {peak >> 20:,} measured")
        assert total == pytest.approx(peak, rel=0.2)

    on_first_rank(world, compare)


@SLOW
def test_resume_export_and_generation(world, folder):
    """The run of adapters goes on with more ranks; its export is the model of the plain loop, in peft and merged."""
    run, every = folder / "run", {"run.checkpoint_every": 3}
    train(world, 2, settings(folder, "lora", **{"run.steps": 3}, **every))
    losses = train(world, 3, settings(folder, "lora", **every))

    options = dict.fromkeys(("step", "tokenizer", "prompt"))
    prompts, out = folder / "prompts.jsonl", folder / "out.jsonl"
    arguments = GenerateArguments(source=run, prompts=prompts, out=out, sampling=SAMPLING, device="cpu", **options)
    (completion,) = generate_all(arguments, world)

    def compare():
        expected, trained = reference(folder, "lora")
        assert losses == pytest.approx(expected, rel=2e-5)
        for out, more in (("adapters", []), ("merged", ["--merge"])):
            assert main(["export", str(run), "--out", str(folder / out), *more]) == 0
        base = transformers.AutoModelForCausalLM.from_pretrained(SMOLLM2, dtype=torch.float32)
        prompt = torch.from_numpy(Dataset(folder / "chats.h5")[0][0])[None]
        with torch.no_grad():
            logits = trained.eval()(input_ids=prompt).logits
        for exported in (
            peft.PeftModel.from_pretrained(base, folder / "adapters"),
            transformers.AutoModelForCausalLM.from_pretrained(folder / "merged"),
        ):
            with torch.no_grad():
                torch.testing.assert_close(exported(input_ids=prompt).logits, logits, rtol=1e-3, atol=1e-3)
            assert completion.tokens == ask(exported) and completion.finish_reason == "stop"
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder / "merged")
        assert tokenizer.decode(completion.tokens) == "The capital of France is Paris.<|im_end|>"

    on_first_rank(world, compare)
