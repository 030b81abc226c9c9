"""The matrix of trainings: each row gives the losses, metrics and parameters of its reference (see `Case`)."""

from pathlib import Path

import pytest
import torch
import torch_reference
from case_rows import EXACT, PLAIN
from exact_runs import ExactRuns
from packed_models import first_values
from parity_case import At
from plain_objectives import OBJECTIVES
from references import find_reference
from small_training import (
    assert_close,
    assert_saved,
    first_minibatches,
    freeze_parameters,
    on_first_rank,
    save_model,
    train_to_the_end,
    training,
    training_apart,
)

from odc_mpi.islands.run_dir import combine_metrics
from odc_mpi.training.inputs import open_inputs

pytestmark = [
    pytest.mark.mpi,
    pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing.:FutureWarning"),  # of peft itself
    pytest.mark.filterwarnings("ignore:The following .*_pattern keys:RuntimeWarning"),  # of peft itself
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning"),  # Dynamo looks at it
]

MODELS = {
    "in_4_bits": {"in_4_bits": True, "hidden_size": 64, "intermediate_size": 128},
    "dense": {"max_shard_size": "40KB"},
    "experts": {"seed": 4, "model_type": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 2, "head_dim": 8,
                "moe_intermediate_size": 16},
}  # fmt: skip


@pytest.fixture
def at(world, monkeypatch, tmp_path, base, request):
    """The circumstances of a row, which it has arranged."""
    case, found = request.getfixturevalue("case"), At(world, monkeypatch, tmp_path, base)
    for arrange in case.using:
        arrange(found)
    yield found
    for each in found.close:
        each.close()


@pytest.fixture
def data(case, request):
    return request.getfixturevalue(OBJECTIVES[case.objective].data)


@pytest.fixture
def config(case, at, data, shared_dir):
    """The configuration of a row. A model in a directory is written first."""
    changes, path = {}, shared_dir / case.settings.get("model__path", "")
    if "model__path" in case.settings:
        changes["model__path"] = path
        if not at.world.gather_objects(path.exists())[0]:
            save_model(at.world, path, **MODELS[path.name])
    return case.configure(data, at.shared, **changes)


@pytest.mark.parametrize("case", PLAIN)
def test_losses_metrics_and_parameters_are_those_of_the_reference(case, config, at, data):
    if case.evaluates:
        compare_with_evaluations(case, config, at)
    else:
        compare(case, config, at, data)


def compare(case, config, at, data):
    lines, state, first = train(case, config, at)
    if case.like is None:
        losses, wanted, objective, _ = find_reference(case, config, at.inputs, at.world.size, list(state))
        for name, values in (objective.series if objective else {}).items():
            means = torch.tensor(values).reshape(len(lines), -1).mean(1).tolist()  # over islands that train apart
            assert [line[name] for line in lines] == pytest.approx(means, rel=1e-4, abs=1e-6), name
            assert max(values) > 1e-3, "otherwise it has no effect here"
    else:
        other = case.configure(data, at.shared / "like", **case.like)
        of_other, wanted, _ = train(case, other, at)
        losses = [line["loss"] for line in of_other]
    assert [line["loss"] for line in lines] == pytest.approx(losses, rel=case.loss)
    compare_parameters(case, config, state, first, wanted)
    for check in case.then:
        check(at, lines)
    at.inputs.close()


def train(case, config, at):
    """Return the metrics of all steps, the parameters after them, and what they were at the start."""
    world, lines = at.world, []
    if not config.islands.train_apart:
        at.inputs = open_inputs(config, world.rank, world.size)
        freeze_parameters(at.inputs.model.module, case.freeze)
        first = first_values(at.inputs.model) if config.lora.r else {}
        with training(config, world, at.inputs) as (trainer, steps):
            return steps(), trainer.model.state_dict(), first
    at.inputs = open_inputs(config, 0, 1)
    with training_apart(config, world) as (trainer, loop):
        for _ in range(config.run.steps):
            lines.append(trainer.step())
            with loop.outer_parameters():  # as for an evaluation, which changes nothing
                pass
        with loop.outer_parameters():
            state = trainer.model.state_dict()
            world.gather_objects(None)
        state = {name: state[name] for name, _ in trainer.model.named_shard_parameters()}
    return combine_metrics(world.gather_objects(lines)[:: config.islands.by]), state, {}


def compare_parameters(case, config, state, first, wanted):
    dtype = getattr(torch, config.model.param_dtype)
    assert case.num_trained in (None, len(wanted))
    if config.lora.r:
        assert {name for name in state if ".lora_" in name or "modules_to_save" in name} == wanted.keys()
        for name in first:
            assert state[name].equal(first[name].to(state[name].dtype)) == (name not in wanted), (
                f"{name} is frozen, or stood still"
            )
            assert state[name].dtype in (torch.float32 if name in wanted else dtype, torch.uint8), name
    if case.close:
        assert_close({name: state[name] for name in wanted} if config.lora.r else state, wanted, *case.close)
    elif case.like is None:  # the masters keep what small updates add up to
        assert config.lora.r or {tensor.dtype for tensor in state.values()} == {dtype}
        share = 2e-2 if config.lora.r else 0.2
        for name, value in wanted.items():
            assert (state[name].float() - value).norm() <= share * value.norm().clamp_min(1e-3), name


def compare_with_evaluations(case, config, at):
    """Also metrics of the first step, and those of held-out data before and after the training."""
    lines, summary = train_to_the_end(config, at.world)

    def compare_first_rank():
        start, *steps = lines
        inputs = open_inputs(config, 0, 1)
        losses, state, objective, module = find_reference(case, config, inputs, 1, None)
        if module is None:
            module = plain_model(config, inputs)
            module.load_state_dict(state)
        assert [line["loss"] for line in steps] == pytest.approx(losses, rel=case.loss)
        for name, values in objective.series.items():
            assert [line[name] for line in steps] == pytest.approx(values, rel=1e-4, abs=1e-6), name
            assert max(values) > 1e-3, "otherwise it has no effect here"
        first = objective.frozen or plain_model(config, inputs)
        with torch.no_grad():
            first_step = objective.metrics(first, inputs.dataset, first_minibatches(config, inputs.dataset)[0])
        wanted = [({name: value.item() for name, value in first_step.items()}, steps[0])]
        wanted += [
            (objective.held_out(first, config.data), start),
            (objective.held_out(module, config.data), steps[-1]),
        ]
        for values, line in wanted:
            for name, value in values.items():
                exact = {"rel": 1e-5 if name.endswith("loss") else 1e-4, "abs": 1e-6 if line is start else 1e-5}
                assert line[name] == pytest.approx(value, **exact), name
        assert summary["eval_loss"] == steps[-1]["eval_loss"]
        assert_saved(Path(config.run.dir), module)

    on_first_rank(at.world, compare_first_rank)


def plain_model(config, inputs):
    return torch_reference.unsharded_model(inputs.model, config.model.config)


@pytest.mark.parametrize("case", EXACT)
def test_the_bits_are_those_of_one_rank(case, at, data):
    """`Case.way` is how the ranks share the work, which changes no bit."""

    def configured(folder, changes):
        return case.configure(data, folder, **{"run.exact": "true", "run.trace_steps": 0} | changes)

    exact = ExactRuns(at.world, at.shared, configured)
    wanted, num_models = exact.alone(), at.world.job.num_models
    found = exact.train("all", at.world, **case.way)
    assert found == wanted
    assert at.world.job.num_models == num_models, "a model was not closed, such as the reference model"
    last = found[1][-1]
    assert last.keys() >= OBJECTIVES[case.objective].exact_names
    assert 0 <= last["fixed64_relative_error"] < 1e-9
    assert len({line["loss"] for line in found[1] if "loss" in line}) > 2
    if case.objective == "grpo":
        assert [line["step"] for line in found[1] if "eval_reward" in line] == (
            [2, 3] if "run__eval_every" in case.settings else []
        )
