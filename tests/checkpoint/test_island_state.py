"""Two islands that train apart are saved, and resumed on other numbers of ranks and islands."""

import copy
import functools

import h5py
import pytest
import torch
from checkpoint_helpers import VOCABULARY, assert_same, build, full_state, load, make_adamw, save, whole, write
from local_transport import LocalGroup, LocalTransport
from ranks import TIMEOUT_S, run_threads

from odc_mpi.checkpoint.commands import digest_line, show_lines, verify
from odc_mpi.checkpoint.manifest import shard_name
from odc_mpi.checkpoint.reader import Checkpoint
from odc_mpi.checkpoint.state import CheckpointWeights, require_model, restore_buffers
from odc_mpi.shard.model import ShardedModel
from odc_mpi.training.islands.state import IslandTrainingState, own_prefix

STEP = "step_00000002"
#: Each island's step of its optimizer.
NUM_STEPS = (2, 3, 4)
SHARED, OWN = ("model", "outer/momentum_buffer", "outer/gradient"), ("residual",)


def values(section, name, island, start, stop):
    """Any numbers that differ between sections, names, islands and elements."""
    return torch.sin(torch.arange(start, stop) + len(section) + 10.0 * len(name) + 100.0 * island)


class Outer:
    """State of an outer optimizer: `values`, or zeros, which a checkpoint replaces."""

    def __init__(self, model, island, num_islands, sections=()):
        self.index, self.num_islands = island, num_islands
        trainable = dict(model.named_shard_parameters())
        slices = {tensor_slice.spec.name: tensor_slice for tensor_slice, _ in model.slices()}
        self.values = {
            section: {
                name: values(section, name, island * (section in OWN), slices[name].start, slices[name].stop)
                if section in sections
                else torch.zeros(parameter.numel())
                for name, parameter in trainable.items()
            }
            for section in (*SHARED, *OWN)
        }
        self.sections = set(sections)

    def tensors(self):
        return {section: self.values[section] for section in (*SHARED, *OWN) if section in self.sections}

    def load_tensors(self, read):
        for section, tensors in self.values.items():
            for name, tensor in tensors.items():
                if (saved := read(section, name)) is not None:
                    tensor.copy_(saved)
                    self.sections.add(section)


def run_islands(num_islands, num_ranks, work):
    """Run `work(transport of the job, transport of the island, island)` on all ranks of all islands."""
    job, *groups = [LocalGroup(size) for size in (num_islands * num_ranks, *[num_ranks] * num_islands)]

    def run(rank):
        island, local_rank = divmod(rank, num_ranks)
        try:
            transport = LocalTransport(groups[island], local_rank, torch.bfloat16)
            return work(LocalTransport(job, rank), transport, island)
        except BaseException:
            groups[island].barrier.abort()
            raise

    return run_threads(num_islands * num_ranks, run, job.barrier, TIMEOUT_S)


def parts(model, optimizer, outer):
    """This rank's part of its island's state."""
    starts = {tensor_slice.spec.name: tensor_slice.start for tensor_slice, _ in model.slices()}
    found = {
        f"{'outer parameters' if section == 'model' else section}/{name}": (starts[name], tensor.clone())
        for section, by_name in outer.tensors().items()
        for name, tensor in by_name.items()
    }
    found |= full_state(model, optimizer)
    return {f"{outer.index}/{path}": part for path, part in found.items()}


def save_islands(directory, num_ranks, sections=(*SHARED, *OWN)):
    module = build()  # once, because the threads have one generator of random numbers

    def work(job, transport, island):
        model = ShardedModel(copy.deepcopy(module), transport)
        optimizer = make_adamw(model.shard_parameters())
        generator = torch.Generator().manual_seed(island)
        for _ in range(NUM_STEPS[island]):
            with model.minibatch():
                model(torch.randint(VOCABULARY, (2, 5), generator=generator)).square().mean().backward()
            optimizer.step()
            model.publish()
        outer = Outer(model, island, 2, sections)
        write(directory, job, job.size, model, optimizer, 2, {}, outer=outer)
        return parts(model, optimizer, outer)

    return whole(run_islands(2, num_ranks, work))


def load_islands(directory, num_islands, num_ranks, out=None):
    def work(job, transport, island):
        module = build(seed=99)
        with Checkpoint(directory) as checkpoint:
            require_model(checkpoint, module)
            restore_buffers(module, checkpoint)
            weights = CheckpointWeights(checkpoint, None, own_prefix(checkpoint.manifest, island, num_islands))
            model = ShardedModel(module, transport, weights=weights)
            optimizer = make_adamw(model.shard_parameters())
            outer = Outer(model, island, num_islands)
            IslandTrainingState(model, optimizer, job.rank, outer).restore(checkpoint)
        if out is not None:
            write(out, job, job.size, model, optimizer, 2, {}, outer=outer)
        return parts(model, optimizer, outer)

    return whole(run_islands(num_islands, num_ranks, work))


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    @functools.cache
    def get(num_ranks):
        directory = tmp_path_factory.mktemp("islands")
        return directory / STEP, save_islands(directory, num_ranks)

    return get


def section_of(state, section):
    """The tensors of a section, by name."""
    return {
        path.removeprefix(f"{section}/"): tensor for path, tensor in state.items() if path.startswith(f"{section}/")
    }


def expected_in_another_number_of_islands(state):
    """What each island, or a run without any, starts with: parameters and optimizer state."""
    parameters = section_of(state, "0/model") | section_of(state, "0/outer parameters")
    found = {f"model/{name}": tensor for name, tensor in parameters.items()}
    for path, tensor in section_of(state, "0/optimizer").items():
        both = [tensor, state[f"1/optimizer/{path}"]]
        found[f"optimizer/{path}"] = torch.stack(both).mean(0) if tensor.dim() else max(both)
    return found


@pytest.mark.parametrize(("writers", "readers"), [(1, 2), (2, 3), (3, 1)])
def test_islands_resume_on_any_number_of_ranks(saved, tmp_path, writers, readers):
    directory, state = saved(writers)
    embedding, moment = (
        [state[f"{k}/{name}/embedding.weight"] for k in (0, 1)] for name in ("model", "optimizer/exp_avg")
    )
    assert not torch.equal(*embedding) and not torch.equal(*moment), "or islands could be confused"
    assert_same(load_islands(directory, 2, readers, tmp_path), state)
    assert digest_line(tmp_path).split()[0] == digest_line(directory).split()[0]
    assert verify(tmp_path)[1] == 0


def test_another_number_of_islands_starts_at_the_outer_parameters(saved):
    directory, state = saved(2)
    expected = expected_in_another_number_of_islands(state)
    expected |= {path.removeprefix("0/"): tensor for path, tensor in state.items() if path.startswith("0/outer")}
    loaded = load_islands(directory, 3, 1)
    assert_same(loaded, {f"{island}/{path}": tensor for island in range(3) for path, tensor in expected.items()})


def test_a_run_without_islands_starts_at_the_outer_parameters(saved):
    directory, state = saved(2)
    loaded, _ = load(directory, 3, param_dtype=torch.bfloat16)
    assert_same(loaded, expected_in_another_number_of_islands(state))
    assert loaded["optimizer/step/embedding.weight"] == max(NUM_STEPS[:2])


def test_islands_start_from_a_checkpoint_without_islands(tmp_path):
    state, *_ = save(tmp_path, 2, param_dtype=torch.bfloat16)
    loaded = load_islands(tmp_path / STEP, 2, 2)
    trainable = {path.partition("/")[2].partition("/")[2] for path in state if path.startswith("optimizer/")}
    for island in (0, 1):
        found = section_of(loaded, f"{island}")
        outer = {f"outer parameters/{name}": state[f"model/{name}"] for name in trainable}
        assert_same(found, state | outer)


def test_a_fragment_in_flight_is_saved_and_absent_otherwise(saved, tmp_path):
    with Checkpoint(saved(1)[0]) as checkpoint:
        name = "outer/gradient/embedding.weight"
        found = torch.from_numpy(checkpoint.read(name, 0, checkpoint.record(name).numel))
    assert torch.equal(found, values("outer/gradient", "embedding.weight", 0, 0, found.numel()))
    state = save_islands(tmp_path, 1, ("model", "outer/momentum_buffer"))
    assert_same(load_islands(tmp_path / STEP, 2, 1), state)
    with Checkpoint(tmp_path / STEP) as checkpoint:
        sections = {path.removesuffix("/embedding.weight") for path in checkpoint.manifest.tensors if "embed" in path}
    optimizers = {f"island/{k}/optimizer/{key}" for k in (0, 1) for key in ("exp_avg", "exp_avg_sq")}
    assert sections == optimizers | {"model", "outer/momentum_buffer", "island/0/model", "island/1/model"}


def test_other_programs_read_islands_through_the_index(saved):
    directory, state = saved(3)
    shapes = {name: tuple(parameter.shape) for name, parameter in build().named_parameters()}
    with h5py.File(directory / "index.h5") as file:
        for section, saved_section in {
            "model": "0/outer parameters",
            "outer/gradient": "1/outer/gradient",
            "island/0/model": "0/model",
            "island/1/model": "1/model",
            "island/1/optimizer/exp_avg": "1/optimizer/exp_avg",
            "island/1/residual": "1/residual",
        }.items():
            for name in section_of(state, "0/outer parameters"):
                found = file[f"{section}/{name}"][()]
                assert found.shape == shapes[name]
                assert torch.equal(torch.as_tensor(found).flatten(), state[f"{saved_section}/{name}"]), section


def test_only_the_first_island_writes_what_all_share(saved):
    directory, _ = saved(2)
    for rank, sections in enumerate([{"model", "outer", "island/0"}] * 2 + [{"island/1"}] * 2):
        with h5py.File(directory / shard_name(2, rank)) as file:
            assert {*file, *(f"island/{k}" for k in file["island"])} - {"checksums", "island"} == sections
    with Checkpoint(directory) as checkpoint:
        for path, record in checkpoint.manifest.tensors.items():
            ranks = {2, 3} if path.startswith("island/1/") else {0, 1}
            assert {rank for rank, *_ in record.ranges} <= ranks, path


def test_show_names_the_islands(saved):
    first, *lines = show_lines(saved(2)[0])
    assert "ranks 4, islands 2, optimizer AdamW" in first
    assert {"optimizer island/0/step: 2", "optimizer island/1/step: 3"} <= set(lines)
