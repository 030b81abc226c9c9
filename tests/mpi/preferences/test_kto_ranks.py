"""KTO on all ranks: its waits, runs that go on, answers that are all desirable, and what is refused."""

import numpy as np
import pytest
from small_training import configure, train_to_the_end
from units import wait_for_file

from odc_mpi.comm.group import Group
from odc_mpi.data.dataset.writer import DatasetWriter
from odc_mpi.errors import AllRanksUserError
from odc_mpi.training.recipes.kto.objective import KLEstimator

pytestmark = [pytest.mark.mpi, pytest.mark.sizes(2)]

BETA, WEIGHTS = 0.5, (1.3, 0.7)


def settings(labels_path, base, **changes):
    return configure(
        labels_path,
        **{
            "run.objective": "kto",
            "kto.beta": BETA,
            "kto.desirable_weight": WEIGHTS[0],
            "kto.undesirable_weight": WEIGHTS[1],
            "data.eval_path": labels_path.with_suffix(".eval.h5"),
            "run.eval_on_start": True,
            "run.dir": base,
            "optim.warmup_steps": 0,
            **changes,
        },
    )


def test_a_resumed_run_has_the_reference_model_of_the_first_start(world, labels_path, base):
    """The losses of the second half are those of a run that was not interrupted."""
    short = {"data.eval_path": None, "run.eval_on_start": None, "model.config.num_hidden_layers": 1}
    changes = short | {"run.checkpoint_every": 1, "optim.lr_scheduler_type": "constant"}
    found = []
    for name, steps in (("a", 3), ("b", 1), ("b", 3)):
        lines, _ = train_to_the_end(settings(labels_path, base / name, **changes, **{"run.steps": steps}), world)
        found.append([line["loss"] for line in lines])
    whole, first, resumed = found
    assert len(first) == 1 and len(resumed) == 3 and resumed == pytest.approx(whole, rel=1e-6)


def test_the_estimate_is_the_only_wait_before_gradients_are_complete(world, labels_path, base, monkeypatch):
    """Rank 1 begins to estimate when rank 0 has come to K; each step has one more collective."""
    arrivals, gather, estimate = [], Group.gather_values, KLEstimator.estimate

    def arrive(*given):
        arrivals.append(base.with_name(f"{base.name}.{len(arrivals)}"))
        if world.rank == 0:
            arrivals[-1].touch()
        return gather(*given)

    def slow(self, minibatch):
        if world.rank == 1:
            wait_for_file(base.with_name(f"{base.name}.{len(arrivals)}"))
        return estimate(self, minibatch)

    monkeypatch.setattr(Group, "gather_values", arrive)
    monkeypatch.setattr(KLEstimator, "estimate", slow)
    changes = {"data.balance": "lb_mini", "run.steps": 2, "data.eval_path": None, "run.eval_on_start": False}
    _, summary = train_to_the_end(settings(labels_path, base, **changes), world)
    assert summary == {} or summary["collectives_per_minibatch"] == 4
    assert len(arrivals) == 2, "one all-gather per step"


def test_answers_that_are_all_desirable_are_imitated_as_sequences(world, base):
    if world.rank == 0:
        base.mkdir()
        for name, columns in (("plain", None), ("labels", {"num_prompt_tokens": 3, "label": 1})):
            with DatasetWriter(base / f"{name}.h5", vocab_size=61, tokenizer="none", source="random") as writer:
                for length in range(5, 21):
                    tokens = np.arange(length, dtype=np.uint32) * 7 % 61
                    writer.append(tokens, np.arange(length) >= 3, columns)
    world.gather_objects(None)
    found = []
    for name in ("plain", "labels"):
        changes = {"run.exact": True, "run.steps": 3, "run.dir": base / name}
        lines, _ = train_to_the_end(configure(base / f"{name}.h5", **changes), world)
        found.append([line["loss"] for line in lines])
    assert found[0] == found[1] and len(found[0]) == 3


@pytest.mark.sizes(1)
def test_data_of_another_kind_is_refused(world, labels_path, pairs_path, base):
    for path, objective, words in (
        (
            labels_path,
            "dpo",
            "has answers with labels, but run.objective is dpo: set it to kto, or prepare records with",
        ),
        (labels_path, "sft", "has answers with labels, but run.objective is sft: set it to kto, or prepare only what"),
        (pairs_path, "kto", "has pairs of a chosen and a rejected answer, but run.objective is kto: set it to dpo or"),
    ):
        with pytest.raises(AllRanksUserError, match=words):
            train_to_the_end(configure(path, **{"run.objective": objective, "run.dir": base}), world)
