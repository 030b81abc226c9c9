"""A sharded model completes as the plain one, on any number of ranks and in any order; and its training goes on."""

import dataclasses
import json
import shutil

import pytest
import torch
import torch_reference
from number_words import number_words
from packed_models import greedy_completion, materialized
from small_training import configure, expected
from transformers import AutoModelForCausalLM

from odc_mpi.checkpoint.commands import open_newest_checkpoint
from odc_mpi.errors import AllRanksUserError
from odc_mpi.generation import run
from odc_mpi.generation.generate import SamplingParams, generate
from odc_mpi.generation.load import GenerateArguments
from odc_mpi.generation.run import generate_all
from odc_mpi.models.decoding import Prompt
from odc_mpi.models.export import export
from odc_mpi.models.load import load_model
from odc_mpi.training.inputs import open_inputs
from odc_mpi.training.train import train

pytestmark = [pytest.mark.mpi, pytest.mark.sizes(2)]

SAMPLINGS = [SamplingParams(max_new_tokens=6), SamplingParams(max_new_tokens=6, temperature=0.9, top_p=0.9, seed=5)]
LONG = {"run.steps": 4, "optim.lr_scheduler_type": "constant"}
#: Words are numbers, so that a text shows its tokens.
WORDS = [" ".join(map(str, words)) for words in ([3], [1, 2, 3, 4], [60, 9], [7] * 12, [8, 1])]


def completions(model, sampling):
    """Completions of a plain model, decoded one at a time: greedy ones are those of transformers."""
    prompts = [Prompt(i, [*map(int, text.split())], (60,)) for i, text in enumerate(WORDS)]
    tokens = [generate(model, prompt, sampling).tokens for prompt in prompts]
    assert sampling.temperature or tokens == [greedy_completion(model, each.tokens, 6, 60) for each in prompts]
    return tokens


@pytest.fixture(scope="module")
def trained(world, shared_dir, dataset_path):
    """A run with two checkpoints, and what is needed to generate with it."""
    settings = {"run.dir": shared_dir / "generation", "run.checkpoint_every": 2, **LONG}
    config = configure(dataset_path, **settings)
    train(config, world)
    if world.rank == 0:
        tokenizer = number_words(end=60)
        tokenizer.chat_template = "{% for message in messages %}{{ message['content'] }} {% endfor %}"
        tokenizer.save_pretrained(shared_dir / "words")
        lines = [{"prompt": text} for text in WORDS[:3]]
        lines += [{"messages": [{"role": "user", "content": text}]} for text in WORDS[3:]]
        (shared_dir / "prompts.jsonl").write_text("\n".join(map(json.dumps, lines)) + "\n\n")
    world.gather_objects(None)
    return config


def job(shared_dir, **changes):
    usual = {
        "source": shared_dir / "generation",
        "step": None,
        "tokenizer": shared_dir / "words",
        "prompt": None,
        "prompts": shared_dir / "prompts.jsonl",
        "sampling": SAMPLINGS[0],
        "out": None,
        "device": "cpu",
    }
    return GenerateArguments(**(usual | changes))


@pytest.mark.sizes(1, 2, 3)
@pytest.mark.parametrize(("step", "sampling"), [(None, SAMPLINGS[1]), ("2", SAMPLINGS[0])])
def test_completions_of_a_checkpoint(world, shared_dir, trained, sampling, step):
    out = shared_dir / f"out-{step}-{sampling.temperature}" / "completions.jsonl"
    found = generate_all(job(shared_dir, sampling=sampling, step=step, out=out), world)
    inputs = open_inputs(trained, 0, 1)
    _, parameters = expected(configure(trained.data.path, **(LONG | {"run.steps": int(step or 4)})), inputs.dataset)
    model = torch_reference.unsharded_model(inputs.model, trained.model.config).eval()
    model.load_state_dict(parameters, strict=False)
    model.set_attn_implementation("sdpa")
    wanted = completions(model, sampling)
    assert [one.tokens for one in found] == wanted
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    assert [line.get("prompt") for line in lines] == [*WORDS[:3], None, None]
    assert lines[3]["messages"] == [{"role": "user", "content": WORDS[3]}]
    texts = [" ".join(str(token) for token in tokens if token != 60) for tokens in wanted]
    assert [line["completion"] for line in lines] == texts
    assert [line["num_tokens"] for line in lines] == [len(tokens) for tokens in wanted]


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing.:FutureWarning")  # of peft itself
def test_adapters_count(world, shared_dir, dataset_path, trained):
    settings = {"lora.r": 4, "optim.learning_rate": 0.1, "run.dir": shared_dir / "adapted", "run.checkpoint_every": 5}
    train(configure(dataset_path, **settings), world)
    found = generate_all(job(shared_dir, source=shared_dir / "adapted", sampling=SAMPLINGS[1]), world)
    model = materialized(load_model(shared_dir / "adapted")).eval()
    model.set_attn_implementation("sdpa")
    model.config.use_cache = True
    assert [one.tokens for one in found] == (wanted := completions(model, SAMPLINGS[1]))
    for name, parameter in model.named_parameters():
        if ".lora_" in name:
            torch.nn.init.zeros_(parameter)
    assert completions(model, SAMPLINGS[1]) != wanted


def test_a_hugging_face_directory(world, shared_dir, trained):
    """An export of the run, with a tokenizer of its own and in bfloat16."""
    if world.rank == 0:
        with open_newest_checkpoint(shared_dir / "generation") as checkpoint:
            export(checkpoint, shared_dir / "exported", dtype="bfloat16")
        for path in (shared_dir / "words").iterdir():
            shutil.copy(path, shared_dir / "exported")
    world.gather_objects(None)
    found = generate_all(job(shared_dir, source=shared_dir / "exported", tokenizer=None), world)
    model = AutoModelForCausalLM.from_pretrained(shared_dir / "exported", dtype=torch.bfloat16).eval()
    assert [one.tokens for one in found] == completions(model, SAMPLINGS[0])
    with pytest.raises(AllRanksUserError, match="--step requires a run"):
        generate_all(job(shared_dir, source=shared_dir / "exported", tokenizer=None, step="4"), world)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"prompts": None, "prompt": " ".join("1" * 300)},
            "--prompt: prompt 0: expected fewer tokens than the model's",
        ),
        ({"step": "3"}, "--step: expected one of 2, 4, got 3"),
        ({"step": "best"}, "--step best: no checkpoint of .* was evaluated"),
        ({"tokenizer": None}, "found none: pass one with --tokenizer"),
    ],
)
def test_what_is_refused(world, shared_dir, trained, changes, words):
    with pytest.raises(AllRanksUserError, match=words):
        generate_all(job(shared_dir, **changes), world)


def test_a_bad_line_is_named_and_nothing_is_written(world, shared_dir, trained):
    path = shared_dir / "bad.jsonl"
    for line, words in (
        ('{"prompt": 1}', "line 2: expected 'prompt' to be a string"),
        ("{", "line 2: expected a JSON object"),
        ('{"prompt": "' + "1 " * 300 + '"}', "line 2: prompt 1: expected fewer tokens"),
    ):
        if world.rank == 0:
            path.write_text(f'{{"prompt": "1"}}\n{line}\n')
        world.gather_objects(None)
        with pytest.raises(AllRanksUserError, match=words):
            generate_all(job(shared_dir, prompts=path, out=shared_dir / "no" / "out.jsonl"), world)
    assert not (shared_dir / "no").exists()


@pytest.mark.parametrize("input_of", ["prompts", "link", "source"])
def test_an_input_is_not_replaced(world, shared_dir, trained, monkeypatch, input_of):
    monkeypatch.setattr(run, "generate", lambda *_: pytest.fail("generated for nothing"))
    arguments = job(shared_dir, prompts=shared_dir / "prompts.jsonl")
    out = {"prompts": arguments.prompts, "link": shared_dir / "link.jsonl"}.get(input_of)
    out = out or next(path for path in arguments.source.rglob("*") if path.is_file())
    if input_of == "link" and world.rank == 0:
        out.symlink_to(arguments.prompts)
    world.gather_objects(None)
    before = out.read_bytes()
    with pytest.raises(AllRanksUserError, match="--out: expected a new file, or one that is not an input, got "):
        run.generate_all(dataclasses.replace(arguments, out=out), world)
    assert out.read_bytes() == before


def test_where_no_file_can_be_nothing_is_generated(world, shared_dir, trained, monkeypatch):
    monkeypatch.setattr(run, "generate", lambda *_: pytest.fail("generated for nothing"))
    for out, words in ((shared_dir, "Is a directory"), (shared_dir / "prompts.jsonl" / "out.jsonl", "Not a directory")):
        with pytest.raises(AllRanksUserError, match=f"--out: cannot write {out}: {words}"):
            run.generate_all(job(shared_dir, out=out), world)
