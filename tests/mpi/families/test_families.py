"""Each family of models: its answer, and whatever it can do, against plain transformers. Writes docs/models.md.

A tiny model is saved by transformers, and takes a step on two ranks with sequences longer than windows and chunks.
Loss and exported parameters must be those of a plain loop, which computes each sequence alone.
"""

import itertools
import os
from pathlib import Path

import peft
import pytest
import torch
import torch_reference
import transformers
from safetensors.torch import load_file
from small_training import configure, on_first_rank, train_to_the_end, training
from tiny_configurations import FAMILIES, tiny_config

from odc_mpi.checkpoint.commands import open_newest_checkpoint
from odc_mpi.data.plan import balance
from odc_mpi.errors import AllRanksUserError, UserError
from odc_mpi.models.attention import ContextParallelUnsupportedError
from odc_mpi.models.build import from_directory
from odc_mpi.models.context_parallel_attention import attention_shape
from odc_mpi.models.decoding import Prompt
from odc_mpi.models.export import export
from odc_mpi.models.quirks.caches import decodes_batches
from odc_mpi.rollout.decode import decode_claimed, prompt_batch
from odc_mpi.rollout.sampling import RolloutSamplingParams
from odc_mpi.training.inputs import open_inputs

pytestmark = [
    pytest.mark.mpi,
    pytest.mark.sizes(2),
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing.:FutureWarning"),  # of peft itself
    pytest.mark.filterwarnings("ignore:The following .*_pattern keys:RuntimeWarning"),  # of peft itself
]

PAGE = Path(__file__).parents[3] / "docs" / "models.md"
HEADER = "| trains | splits | LoRA | generates | exports | families |\n|---|---|---|---|---|---|\n"
EXPERTS = ["experts.gate_up_proj", "experts.down_proj"]
#: Modules and parameters with adapters: experts, transposed experts with attention sinks, soft caps, state space.
ADAPTED = {
    "mixtral": ("all-linear", None),  # peft adds experts and the router itself
    "deepseek_v3": ("all-linear", EXPERTS),
    "gpt_oss": (["q_proj", "o_proj"], EXPERTS),
    "gemma2": ("all-linear", None),
    "mamba2": (["in_proj"], None),
}
#: Cells of the table, and what the start-up line says, for models that train on padded rows or on single sequences.
UNPACKED = {
    "in padded rows": "padded rows of sequences of like length: ",
    "one sequence per microbatch": "one sequence per microbatch: ",
}
#: Cells of the table for each family that has been tried.
rows = {}


def save_reference(config, path):
    """Save a model of transformers whose parameters all matter, and return it."""
    torch.manual_seed(1)
    kind = transformers.AutoModelForMultimodalLM if is_composite(config) else transformers.AutoModelForCausalLM
    reference = kind.from_config(config, attn_implementation="eager", dtype=torch.float32).eval()
    reference.config.get_text_config().use_cache = False
    for parameter in reference.parameters():
        if parameter.ndim < 2:
            parameter.data.add_(0.1 * torch.randn_like(parameter))
    reference.save_pretrained(path)
    # The whole model of Llama 4 does not run in transformers 5.24.
    return reference.language_model if config.model_type == "llama4" else reference


def is_composite(config):
    return config.get_text_config() is not config


def text_model(reference, exported):
    """Return the text part of a multimodal model, with the names under which transformers loads the export."""
    text = transformers.AutoModelForCausalLM.from_pretrained(exported, dtype=torch.float32)
    state = {name.replace("language_model.", ""): tensor for name, tensor in reference.state_dict().items()}
    text.load_state_dict({name: state[name] for name in text.state_dict()})
    return text


def try_step(world, dataset_path, path, reference, capsys):
    """Take a step on all ranks; loss and export are those of the plain loop. Return the cells "trains" and "splits"."""
    changes = {"run.steps": 1, "run.checkpoint_every": 1, "run.dir": path / "run", "optim.warmup_steps": 0}
    config = configure(dataset_path, **{"model.path": path / "model", **changes})
    inputs = world.run_on_all(lambda: open_inputs(config, 0, 1))
    packs, indices = inputs.model.packing.packs, next(inputs.loader).indices
    cell, how = list(UNPACKED.items())[not inputs.model.packing.pads_rows]
    lines, _ = train_to_the_end(config, world)
    printed = capsys.readouterr().out

    def compare():
        assert [how for how in UNPACKED.values() if f"\npacking off, {how}" in printed] == ([] if packs else [how])
        loss = torch_reference.train(reference, inputs.dataset, [indices], config.optim)
        assert lines[0]["loss"] == pytest.approx(loss[0], rel=2e-5)
        with open_newest_checkpoint(path / "run") as checkpoint:
            export(checkpoint, path / "exported")
        composite = is_composite(reference.config)
        published = text_model(reference, path / "exported") if composite else reference
        published.save_pretrained(path / "expected")
        exported, expected = (load_file(path / name / "model.safetensors") for name in ("exported", "expected"))
        assert exported.keys() == expected.keys()
        for name, tensor in expected.items():
            torch.testing.assert_close(exported[name], tensor, rtol=2e-5, atol=2e-5, msg=lambda m, n=name: f"{n}: {m}")

    on_first_rank(world, compare)
    inputs.close()
    return "packed" if packs else cell, try_split(inputs.model) if packs else "no"


def try_adapters(world, dataset_path, path, reference):
    """Take a step with adapters, which have no effect yet, and generate. Return the cells "LoRA" and "generates"."""
    changes = {"run.steps": 1, "optim.learning_rate": 0, "run.resume": "never", "model.path": path / "exported"}
    configs = [configure(dataset_path, **changes, **{"lora.r": r}) for r in (2, None)]
    try:
        cell, inputs = "yes", world.run_on_all(lambda: open_inputs(configs[0], world.rank, world.size))
    except AllRanksUserError:
        cell, inputs = "no", open_inputs(configs[1], world.rank, world.size)
    indices = inputs.loader._order[:7]
    with training(configs[cell == "no"], world, inputs) as (trainer, steps):
        loss = steps()[0]["loss"]
        prompts = [Prompt(i, [*range(3, 3 + length)], ()) for i, length in enumerate((6, 2, 9))]
        waiting, completions, module = iter(prompts), {}, trainer.model.module.eval()
        batch = prompt_batch(module, RolloutSamplingParams(1, 4, temperature=0.0), 2, completions.__setitem__)
        # The third prompt takes the place of one that has ended.
        decode_claimed(batch, lambda count: {each.number: each for each in itertools.islice(waiting, count)}, 1)
        generates = "in batches" if decodes_batches(module) else "one by one"

    def compare():
        wanted = torch_reference.compute_loss(reference.eval(), inputs.dataset, indices)
        assert loss == pytest.approx(wanted.item(), rel=2e-5)
        settings = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0, "use_cache": False}
        for prompt in prompts:
            tokens = torch.tensor([prompt.tokens])
            expected = reference.generate(tokens, attention_mask=torch.ones_like(tokens), **settings)
            assert completions[prompt.number].tokens == [expected[0, len(prompt.tokens) :].tolist()]

    on_first_rank(world, compare)
    return cell, generates


def try_split(meta_model):
    try:
        attention_shape(meta_model.module, 40)
    except ContextParallelUnsupportedError:
        return "no"
    return "yes"


@pytest.fixture
def long_padding(monkeypatch):
    """Microbatches in padded rows have rows of all lengths."""
    monkeypatch.setattr(balance, "ROWS_PER_RANK", 1)
    monkeypatch.setattr(balance, "MIN_ROW_SHARE", 0)


@pytest.mark.usefixtures("long_padding")
@pytest.mark.parametrize("family", FAMILIES)
def test_family(world, dataset_path, base, capsys, family):
    config = tiny_config(family)
    if config is None:
        pytest.skip(f"transformers {transformers.__version__} does not have it")
    reference = save_reference(config, base / "model") if world.rank == 0 else None
    world.gather_objects(None)
    try:
        trains, splits = try_step(world, dataset_path, base, reference, capsys)
    except AllRanksUserError as error:
        rows[family] = f"| no: {str(error).partition('model.path: ')[2]} | | | | |"
        return
    adapters, generates = try_adapters(world, dataset_path, base, reference)
    rows[family] = f"| {trains} | {splits} | {adapters} | {generates} | yes |"


@pytest.mark.parametrize("family", ADAPTED)
def test_adapters_train_as_in_peft(world, dataset_path, base, family):
    """Losses of two steps, and the exported adapters by name, are those of peft in a plain loop."""
    if world.rank == 0:
        reference = save_reference(tiny_config(family), base / "model")
    world.gather_objects(None)
    modules, parameters = ADAPTED[family]
    names = {"lora.target_modules": modules, "lora.target_parameters": parameters}
    changes = {
        key: value if isinstance(value, str) else f"[{','.join(value)}]" for key, value in names.items() if value
    }
    changes |= {"model.path": base / "model", "run.dir": base / "run", "run.steps": 2, "run.checkpoint_every": 2}
    config = configure(dataset_path, **changes, **{"lora.r": 4, "lora.alpha": 16, "optim.warmup_steps": 0})
    inputs = world.run_on_all(lambda: open_inputs(config, 0, 1))
    lines, _ = train_to_the_end(config, world)

    def compare():
        lora = {"r": 4, "lora_alpha": 16, "target_modules": modules, "target_parameters": parameters}
        adapted = torch_reference.with_adapters(reference, inputs.model.weights, **lora)
        minibatches = [minibatch.indices for minibatch in itertools.islice(inputs.loader, 2)]
        losses = torch_reference.train(adapted, inputs.dataset, minibatches, config.optim)
        assert [line["loss"] for line in lines] == pytest.approx(losses, rel=2e-5)
        with open_newest_checkpoint(base / "run") as checkpoint:
            export(checkpoint, base / "exported")
        exported = load_file(base / "exported" / "adapter_model.safetensors")
        expected = peft.get_peft_model_state_dict(adapted)
        assert exported.keys() == expected.keys()
        for name, tensor in expected.items():
            assert tensor.any(), name
            torch.testing.assert_close(exported[name], tensor, rtol=1e-4, atol=2e-5, msg=lambda m, n=name: f"{n}: {m}")

    on_first_rank(world, compare)
    inputs.close()


def test_adapters_of_a_multimodal_model_are_exported_merged(world, dataset_path, base):
    if world.rank == 0:
        save_reference(tiny_config("gemma3"), base / "model")
    world.gather_objects(None)
    changes = {"model.path": base / "model", "run.dir": base / "run", "run.steps": 1, "run.checkpoint_every": 1}
    train_to_the_end(configure(dataset_path, **changes, **{"lora.r": 2, "optim.warmup_steps": 0}), world)

    def compare():
        with open_newest_checkpoint(base / "run") as checkpoint:
            with pytest.raises(UserError, match=r"which is multimodal: .* export the merged text model with --merge"):
                export(checkpoint, base / "adapters")
            export(checkpoint, base / "merged", merge=True)
        with pytest.raises(UserError, match=r"unknown setting .*: did you mean text_config.rms_norm_eps\?"):
            from_directory(base / "model", overrides={"rms_norm_eps": 1e-4})
        kind = transformers.AutoModelForCausalLM
        _, problems = kind.from_pretrained(base / "merged", dtype=torch.float32, output_loading_info=True)
        assert not problems["missing_keys"] and not problems["unexpected_keys"]

    on_first_rank(world, compare)


def test_table(world):
    """Compare docs/models.md with the cells of the families that were tried, if all were."""
    if len(rows) < sum(tiny_config(family) is not None for family in FAMILIES):
        pytest.skip("not all families were tried")
    before, _, rest = PAGE.read_text().partition(HEADER)
    table, _, after = rest.partition("\n\n")
    lines = [line.rstrip(" |").rpartition("| ") for line in table.splitlines()]
    written = {family: cells + "|" for cells, _, families in lines for family in families.split(", ")}
    if os.environ.get("ODC_MPI_WRITE_TABLE") and world.rank == 0:
        families_of = {}
        for family in FAMILIES:
            families_of.setdefault((written | rows)[family], []).append(family)
        table = "".join(f"{cells} {', '.join(families)} |\n" for cells, families in families_of.items())
        PAGE.write_text(before + HEADER + table + "\n" + after)
    elif world.rank == 0:
        command = "ODC_MPI_WRITE_TABLE=1 mpiexec -n 2 python -m pytest --with-mpi --only-mpi tests/mpi/families"
        assert {family: written.get(family) for family in rows} == rows, f"write docs/models.md: {command}"
