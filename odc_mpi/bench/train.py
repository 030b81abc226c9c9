"""Training in every way on the same minibatches: FSDP2, our collectives, our windows, and without communication.

    the ceiling    rank 0 trains on all of them by plain torch while the others sleep: as fast as one process is, by as
                   many as there are ranks
    apart          each rank runs its own microbatches by plain torch, all at once, and exchanges nothing: what
                   communication costs, on cores that share a machine

In rounds, as `bench.contenders` has it. All losses must agree but those apart, which optimize by their own gradients.
"""

import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import torch

from odc_mpi.bench.baselines.collective import CollectiveBaseline
from odc_mpi.bench.baselines.fsdp import FSDPBaseline
from odc_mpi.bench.baselines.unsharded import UnshardedBaseline
from odc_mpi.bench.contenders import Contender, OdcContender, Round, agreement, check_comparable, run_rounds
from odc_mpi.bench.measure import ratio
from odc_mpi.bench.rank_timing import header
from odc_mpi.data.prepare import PrepareOptions, prepare
from odc_mpi.errors import AllRanksUserError
from odc_mpi.runtime.world import World
from odc_mpi.simulate.events import quartiles
from odc_mpi.training.exact.required_settings import apply_exact_settings
from odc_mpi.training.inputs import Inputs, open_inputs
from odc_mpi.training.run import build_trainer, decide
from odc_mpi.training.settings import CommConfig, Config, DataConfig, ModelConfig, OptimConfig, Size, load

BASELINE = "fsdp2"
CEILING = "ceiling"
INDEPENDENT = "apart"
#: The balance of the contender that is `dynamic` with the longest sequences in pieces over ranks.
SPLIT = "split"
#: transport/balance, all on our runtime.
COLLECTIVE = "collective/lb_micro"
OURS = ("window/local_sort", "window/lb_micro", "window/lb_mini", "window/dynamic", f"window/{SPLIT}")
#: The same with `run.exact`, where that is asked for.
EXACT = ("exact/lb_mini", "exact/dynamic")
CONTENDERS = (BASELINE, COLLECTIVE, *OURS, INDEPENDENT, CEILING)
#: Losses may differ by so much of the loss: fp32 sums of another order, carried on through the steps; 4e-7 was seen.
TOLERANCE = 1e-5
#: What all contenders do alike, by setting: those in plain torch have no other way.
COMPARABLE = {
    "model.param_dtype": ("float32",),
    "model.reduce_dtype": ("float32",),
    "model.gradient_checkpointing": (False,),
    "model.compile": (False,),
    "run.device": ("cpu",),
    "optim.device": ("cpu",),
    # Every contender is there all the time, and a thread of one would take time from the others, too.
    "comm.progress": ("auto", "off"),
}


#: Where the quick start prepares its data set; the benchmark's own is the same.
DATA = Path("runs/data/stdlib.h5")
MAX_LENGTH = 1024
#: What is trained unless a configuration is given, by the name of the option: of 8 and 9 million parameters, a sequence
#: or a few per microbatch.
MODELS: dict[str, dict[str, Any]] = {
    name: {
        "model_type": name,
        "vocab_size": 4096,
        "hidden_size": 256,
        "intermediate_size": intermediate_size,
        "num_hidden_layers": 8,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 2048,
        "tie_word_embeddings": True,
    }
    for name, intermediate_size in (("qwen2", 896), ("llama", 1024))
}


def configuration(
    world: World, path: Path | None, report: Callable[[str], None], model: str = "qwen2", *, caches: bool = True
) -> Config:
    """Load the configuration to train. Collective.

    Args:
        world: The ranks.
        path: Of a configuration of `odc-mpi train`; None for a model of `MODELS` on the built-in data set, which is
            prepared if it is not there.
        report: Called with a line on what comes next.
        model: One of `MODELS`.
        caches: Whether units may stay and gradients be added up, as the configuration has it; False: not.

    Raises:
        UserError: As for a run; on every rank.
    """
    if path is None and world.rank == 0 and not DATA.exists():
        report(f"nothing yet: preparing {DATA} first")
        prepare(["stdlib"], DATA, PrepareOptions(max_length=MAX_LENGTH))
    world.wait_collective(world.comm.Ibarrier(), "preparing the data set")
    config = world.run_on_all(lambda: load(path) if path else default_configuration(world.timeout_s, model))
    if caches:
        return config
    none = Size(0)
    return replace(config, comm=replace(config.comm, parameter_cache_bytes=none, gradient_cache_bytes=none))


def default_configuration(timeout_s: float, model: str = "qwen2") -> Config:
    """Return the configuration that is trained unless another one is given."""
    return Config(
        model=ModelConfig(config=MODELS[model]),
        data=DataConfig(path=str(DATA), minibatch_sequences=16, max_tokens_per_microbatch=MAX_LENGTH),
        comm=CommConfig(timeout_s=timeout_s),
        optim=OptimConfig(learning_rate=1e-3),
    )


def measure(
    world: World,
    config: Config,
    steps: int,
    repeats: int,
    report: Callable[[str], None] = lambda line: None,
    *,
    exact: bool = False,
) -> dict[str, Any]:
    """Train in every way. Collective.

    Args:
        world: The ranks, all on one node.
        config: Model, data, optimizer and settings of communication; the balance is that of each contender.
        steps: Minibatches of a round.
        repeats: Rounds that count; one more comes before them.
        report: Called with a line on what comes next.
        exact: Whether runs with `run.exact` take part, too.

    Returns:
        `tokens_per_s`, `quartiles`, `ratio_to_fsdp2`, `ratio_to_ceiling`, `ratio_to_apart`, each by contender, ratios
        as medians over rounds; `losses` of the first contender and `loss_deviation`, the most by which any other but
        `apart` differs; and what it was measured on. The same on every rank.

    Raises:
        AgreedError: Settings, data and model do not fit together, or losses differ; on every rank.
    """
    if world.num_nodes > 1:
        raise AllRanksUserError(f"bench train compares on one node, got {world.num_nodes}")
    world.run_on_all(lambda: check_comparable(config, COMPARABLE, "bench train"))
    before = os.getloadavg()[0]
    torch.set_num_threads(config.run.threads or 1)
    contenders = _Contenders(world, config, (*OURS, *EXACT) if exact else OURS)
    rounds = run_rounds(world, contenders.by_name, steps, repeats, report)
    contenders.close()
    deviations = agreement(
        {name: rounds_of_contender for name, rounds_of_contender in rounds.items() if name != INDEPENDENT},
        BASELINE,
        TOLERANCE,
    )
    return {
        **header(world, "train", before, repeats=repeats, steps=steps, threads=torch.get_num_threads()),
        **_figures(rounds, world.size),
        "loss_deviation": deviations,
        **contenders.describe(),
    }


class _Contenders:
    """All ways to train, each with a model of its own. Making them is collective."""

    def __init__(self, world: World, config: Config, ours: Sequence[str]) -> None:
        self._world, self._config = world, config
        in_turns, independent = self._with("window", "lb_micro"), self._with("window", "lb_mini")
        self._fsdp = FSDPBaseline(world, in_turns, self._inputs(in_turns).sequence_loader)
        self._collective = CollectiveBaseline(world, in_turns.optim, self._inputs(in_turns))
        configs = {name: self._with(*name.split("/")) for name in ours}
        decisions = {name: decide(contender_config, world) for name, contender_config in configs.items()}
        self._trainers = {
            name: build_trainer(contender_config, world, self._inputs(contender_config), decisions[name])
            for name, contender_config in configs.items()
        }
        self._decision = decisions[OURS[-1]]
        self.by_name: Mapping[str, Contender] = {
            BASELINE: self._fsdp,
            COLLECTIVE: self._collective,
            **{name: OdcContender(trainer, world.rank) for name, trainer in self._trainers.items()},
            INDEPENDENT: UnshardedBaseline(
                independent, open_inputs(independent, world.rank, world.size).sequence_loader
            ),
            CEILING: self._make_ceiling(),
        }

    def describe(self) -> dict[str, Any]:
        """Return the size of the model and the decisions that our contenders run on."""
        model = self._trainers[OURS[-1]].model
        return {
            "model_numel": sum(map(math.prod, model.parameter_shapes().values())),
            "reduction": self._decision.reduction.value,
            "zero_copy": self._decision.zero_copy.value,
            "progress": self._decision.progress.value,
            "parameter_cache_bytes": model.cache_bytes.parameters,
            "gradient_cache_bytes": model.cache_bytes.gradients,
        }

    def close(self) -> None:
        """End them. Collective."""
        for trainer in self._trainers.values():
            with trainer:
                trainer.model.close()
        self._collective.close()
        self._fsdp.close()

    def _inputs(self, config: Config) -> Inputs:
        return self._world.run_on_all(lambda: open_inputs(config, self._world.rank, self._world.size))

    def _make_ceiling(self) -> Contender:
        if self._world.rank:
            return IdleContender()
        config = self._with("window", "lb_mini")
        return UnshardedBaseline(config, open_inputs(config, rank=0, size=1).sequence_loader)

    def _with(self, kind: str, balance: str) -> Config:
        config, whole = self._config, balance != SPLIT
        data = replace(config.data, balance=cast(Any, balance if whole else "dynamic"))
        return apply_exact_settings(
            replace(
                config,
                comm=replace(config.comm, progress="off"),
                data=replace(data, context_parallel="off" if whole else "auto"),
                optim=replace(config.optim, lr_scheduler_type="constant", warmup_steps=0),
                run=replace(config.run, exact=kind == "exact"),
            )
        )


class IdleContender:
    """The contender of the other ranks while the first one trains alone."""

    def step(self) -> tuple[float, int]:
        """Do nothing."""
        return 0.0, 0


def _figures(rounds: Mapping[str, Sequence[Round]], num_ranks: int) -> dict[str, Any]:
    """Return speeds and their ratios; the first round was to warm up."""
    ranks = {name: num_ranks if name == CEILING else 1 for name in rounds}
    seconds = {
        name: [done.seconds / ranks[name] for done in rounds_of_contender[1:]]
        for name, rounds_of_contender in rounds.items()
    }
    spreads = {
        name: quartiles([ranks[name] * done.num_tokens / done.seconds for done in rounds_of_contender[1:]])
        for name, rounds_of_contender in rounds.items()
    }
    return {
        "tokens_per_s": {name: spread["median"] for name, spread in spreads.items()},
        "quartiles": {name: [spread["low"], spread["high"]] for name, spread in spreads.items()},
        **{
            f"ratio_to_{reference}": {name: ratio(seconds[reference], times) for name, times in seconds.items()}
            for reference in (BASELINE, CEILING, INDEPENDENT)
        },
        "losses": [loss for done in rounds[BASELINE] for loss in done.losses],
    }
