"""Estimate of the memory that a rank of a run needs, without allocating parameters.

Activations are estimated from the tensors that autograd saves for a few tokens on the meta device or, if the model
cannot run there, with a formula. Attention scores are counted only for eager attention and soft caps.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from odc_mpi.api import dtypes_by_parameter, frozen_fit_on_node
from odc_mpi.checkpoint.memory import GENERATIONS
from odc_mpi.comm.device.device_memory import OPTIMIZER_BYTES
from odc_mpi.comm.islands.islands import ranks_per_island
from odc_mpi.comm.settings import CommConfig
from odc_mpi.islands.encoding import make_encoding
from odc_mpi.models.build import MetaModel
from odc_mpi.models.families import trial_inputs
from odc_mpi.models.quantization.linear import largest_numel
from odc_mpi.models.token_logps import MAX_ELEMENTS
from odc_mpi.runtime.memory import available_bytes
from odc_mpi.shard.cache_budget import CacheBytes, auto_cache_bytes, node_cache_fits
from odc_mpi.shard.gradients import num_push_buffers
from odc_mpi.shard.partition import make_units, partition
from odc_mpi.shard.units.unsharded import MAX_UNSHARDED_UNITS
from odc_mpi.training.recipes import recipe_of
from odc_mpi.training.settings import Config

#: Tokens in the forward pass on the meta device. Few, because attention saves scores there, which grow quadratically.
_NUM_TOKENS = 16
#: Bytes of 16-bit activations per token, layer and hidden unit (Korthikanti et al., arXiv 2205.05198).
_FORMULA_BYTES = 34
#: Size of the freed blocks that malloc keeps between blocks in use, as a fraction of activations and logits. Fitted to
#: the peaks of models with 1.3 and 135 million parameters on 1 and 2 ranks, for which 0.4 to 0.6 would be exact.
_MALLOC_SHARE = 0.5
#: Number of fp32 arrays as large as a block of logits: the logits, and their probabilities or gradients.
_LOGITS_COPIES = 2
#: Bytes that a tensor takes in a rank's file besides its data, and in the description of the file (measured: 570).
_TENSOR_BYTES = 700


@dataclass(frozen=True)
class MemoryPart:
    """Memory, in bytes, that a rank needs for the purpose `name`. `on_gpu` is False for host memory."""

    name: str
    num_bytes: int
    on_gpu: bool = False


def estimate_memory(
    config: Config,
    model: MetaModel,
    num_ranks: int,
    ranks_per_node: int,
    lengths: Sequence[int],
    *,
    accumulates: bool = True,
) -> list[MemoryPart]:
    """Return the parts of peak memory on the rank that needs the most. `config` must be resolved (see `with_device`).

    `lengths` contains the number of tokens in each sequence of the largest microbatch. `accumulates` is True if a rank
    may run several microbatches per step and therefore caches the sum of their gradients.
    """
    gpu = config.run.device == "cuda"
    # On several nodes only if the doctor has proved the operations, which is not known here.
    is_auto = config.comm.window_device == "auto" and config.islands.by == "off"
    maps_gpus = is_auto and num_ranks <= ranks_per_node
    shards_on_gpu = gpu and (config.comm.window_device == "cuda" or maps_gpus)
    optimizer_on_gpu = gpu and config.optim.device == "cuda"
    island_size = ranks_per_island_of(config, num_ranks, ranks_per_node)
    train_apart = config.islands.train_apart and island_size < num_ranks
    num_islands = num_ranks // island_size
    frozen_on_node = holds_frozen_on_node(config, model, num_ranks, ranks_per_node)
    counts = (island_size, 1) if train_apart else (num_ranks, num_islands)
    sizes = _Sizes.from_config(config, model, *counts, frozen_on_node=frozen_on_node)
    num_models = 2 if recipe_of(config).compares_with_base(config) else 1
    dtype, teacher = getattr(torch, config.model.param_dtype), recipe_of(config).teacher(config)
    teacher_bytes = dtype.itemsize * sum(x.numel() for x in teacher.module.parameters()) if teacher else 0
    teacher_shard = -(-teacher_bytes // num_ranks)
    zero_copy = ranks_per_node >= island_size and config.comm.zero_copy != "off"
    shared_bytes = 0 if zero_copy or shards_on_gpu else _node_cache_bytes(config, sizes, ranks_per_node)
    other_bytes = teacher_bytes - teacher_shard if zero_copy else 0
    mapped_bytes = sum(sizes.units) - sizes.shard if zero_copy else sizes.frozen - sizes.frozen // ranks_per_node
    fetch_copies = gpu or not (zero_copy or shared_bytes)  # units are fetched into buffers of this rank
    in_shard = island_size == 1 and (shards_on_gpu or not gpu)  # gradients are accumulated there
    needed_gradients = sum(sizes.gradients) if accumulates and not in_shard else 0
    needs = CacheBytes(sum(sizes.units[1:]) if fetch_copies else 0, needed_gradients)
    caches = _caches(config, needs, ranks_per_node, sizes.states + shared_bytes)
    all_cached = caches.parameters >= needs.parameters
    held_bytes = sizes.units[0] + (0 if all_cached else sum(sorted(sizes.units[1:])[-MAX_UNSHARDED_UNITS:]))
    # Push buffers, unless all gradients fit in the cache.
    all_accumulated = 0 < needs.gradients <= caches.gradients
    num_buffers = 0 if all_accumulated or in_shard else num_push_buffers(config.comm.prefetch)
    transit_bytes = sizes.largest_autograd + num_buffers * max(sizes.gradients, default=0)
    activations, logits = _activation_bytes(config, model, dtype, lengths)
    tier_bytes = memory_tier_bytes(config, model, num_ranks, ranks_per_node) if config.run.memory_every else 0
    parts = [
        MemoryPart("parameters", sizes.shard, shards_on_gpu),
        MemoryPart("frozen, over the node", sizes.frozen // ranks_per_node),
        MemoryPart("reference model", sizes.shard * (num_models - 1) + teacher_shard, shards_on_gpu),
        MemoryPart("of other ranks, mapped", 0 if gpu else num_models * mapped_bytes + other_bytes),
        MemoryPart("node cache", shared_bytes),
        MemoryPart("fp32 masters", sizes.masters, optimizer_on_gpu),
        MemoryPart("gradients", sizes.gradient_shard, shards_on_gpu),
        MemoryPart("optimizer", sizes.states, optimizer_on_gpu),
        MemoryPart(
            "merges of islands", _merge_bytes(config, sizes, num_islands) if train_apart else 0, optimizer_on_gpu
        ),
        MemoryPart("copy to save", sizes.saved),
        MemoryPart("copies in memory_dir", tier_bytes),
        MemoryPart("copy to write there", sizes.saved if tier_bytes else 0),
        MemoryPart("fetched units", held_bytes if fetch_copies else 0, gpu),
        MemoryPart("parameter cache", caches.parameters, gpu),
        MemoryPart("gradient cache", caches.gradients, gpu),
        MemoryPart("gradients in transit", transit_bytes, gpu),
        MemoryPart("dequantized weight", largest_numel(model.module) * dtype.itemsize, gpu),
        MemoryPart("activations", activations, gpu),
        MemoryPart("logits", logits, gpu),
        MemoryPart("free blocks of malloc", 0 if gpu else round((activations + logits) * _MALLOC_SHARE)),
    ]
    return [part for part in parts if part.num_bytes > 0]


def memory_tier_bytes(config: Config, model: MetaModel, num_ranks: int, ranks_per_node: int) -> int:
    """Return the bytes that a rank's states take in `run.memory_dir`, with the copies of those of another node."""
    island_size = ranks_per_island_of(config, num_ranks, ranks_per_node)
    on_node = holds_frozen_on_node(config, model, num_ranks, ranks_per_node)
    saved = _Sizes.from_config(config, model, num_ranks, num_ranks // island_size, frozen_on_node=on_node).saved
    num_tensors = 3 * sum(parameter.requires_grad for parameter in model.module.parameters())
    num_copies = 2 if num_ranks > ranks_per_node else 1
    return GENERATIONS * num_copies * (saved + num_tensors * _TENSOR_BYTES)


def holds_frozen_on_node(config: Config, model: MetaModel, num_ranks: int, ranks_per_node: int) -> bool:
    """Return True if the ranks of each of several nodes hold all frozen parameters (`comm.frozen_scope`)."""
    comm, num_bytes = config.comm, frozen_bytes(model)
    is_possible = config.run.device != "cuda" and config.islands.by == "off" and comm.zero_copy != "off"
    if num_ranks <= ranks_per_node or not is_possible or not num_bytes or comm.frozen_scope == "world":
        return False
    return comm.frozen_scope == "node" or frozen_fit_on_node(num_bytes, ranks_per_node, comm)


def frozen_bytes(model: MetaModel) -> int:
    """Return the size in bytes of the frozen parameters of a model with adapters; 0 without adapters."""
    parameters = model.module.parameters() if model.adapter else ()
    return sum(p.numel() * p.itemsize for p in parameters if not p.requires_grad)


def ranks_per_island_of(config: Config, num_ranks: int, ranks_per_node: int) -> int:
    """Return the number of ranks in an island, or `num_ranks` without islands. Raises `UserError` if they differ."""
    nodes = {str(first): min(ranks_per_node, num_ranks - first) for first in range(0, num_ranks, ranks_per_node)}
    return ranks_per_island(config.islands.by, nodes)


@dataclass(frozen=True)
class _Sizes:
    """Sizes in bytes of unsharded units, of a rank's shards, and of the optimizer's data for these shards."""

    units: list[int]
    gradients: list[int]  # of each unit, in the type of the sums
    largest_autograd: int  # gradients of the largest unit, in the type of the parameters
    shard: int
    frozen: int  # arrays that the ranks of each node hold whole
    gradient_shard: int
    masters: int
    states: int
    saved: int  # copied to the host for a checkpoint
    trained_numel: int  # elements of the trainable shards

    @classmethod
    def from_config(
        cls, config: Config, model: MetaModel, num_ranks: int, num_islands: int, *, frozen_on_node: bool
    ) -> "_Sizes":
        dtype = getattr(torch, config.model.param_dtype)
        default, dtypes = dtypes_by_parameter(model.module) if model.adapter else (dtype, {})
        units, layouts = make_units(partition(model.module, None)[0], num_ranks, dtypes, default)

        def size(layout: Any) -> int:
            dtype: torch.dtype = layout.dtype or default
            return dtype.itemsize

        itemsize = 8 if config.model.reduce_dtype == "fixed64" else 4
        numels = [sum(x.numel for x in unit.layouts if x.trainable) for unit in units]
        trained = [x for x in layouts if x.trainable]
        fetched = [x for x in layouts if x.trainable or not frozen_on_node]
        shard_numel = sum(x.shard_numel for x in trained)
        narrow = any(size(x) < 4 for x in trained)
        states = shard_numel * (OPTIMIZER_BYTES if config.optim.optimizer == "adamw" else 4)
        return cls(
            units=[sum(x.numel * size(x) for x in unit.layouts if x in fetched) for unit in units],
            gradients=[itemsize * numel for numel in numels],
            largest_autograd=dtype.itemsize * max(numels, default=0),
            shard=num_islands * sum(x.shard_numel * size(x) for x in fetched),
            frozen=sum(x.numel * size(x) for x in layouts) - sum(x.numel * size(x) for x in fetched),
            # With islands: the sums of the island, and this rank's part of those of all islands.
            gradient_shard=itemsize * shard_numel * (num_islands + (num_islands > 1)),
            masters=4 * shard_numel if narrow else 0,
            states=states,
            saved=4 * shard_numel + states,
            trained_numel=shard_numel,
        )


def _merge_bytes(config: Config, sizes: _Sizes, num_islands: int) -> int:
    """Return the bytes that merges add to a rank: merged parameters and momentum, copies to save, and messages."""
    islands, numel = config.islands, sizes.trained_numel
    kept = 8 + 4 * islands.error_feedback
    # Four arrays of the fragment's elements, such as differences and means; two messages in the window, one to show,
    # and those of all islands.
    message = make_encoding(islands.wire, islands.topk).num_bytes(numel)
    in_transit = (16 * numel + (num_islands + 3) * message) // islands.fragments
    # An evaluation keeps a copy of the local parameters.
    return 2 * kept * numel + max(in_transit, 4 * numel)


def _node_cache_bytes(config: Config, sizes: _Sizes, ranks_per_node: int) -> int:
    comm, num_bytes = config.comm, sum(sizes.units)
    if "off" in (comm.node_cache, comm.zero_copy) or ranks_per_node == 1:
        return 0
    comm = CommConfig() if config.run.device == "cuda" else comm  # caches on GPUs take no host memory
    own_bytes = sizes.shard + sizes.gradient_shard + sizes.masters + sizes.states
    fits = node_cache_fits(num_bytes, available_bytes() - ranks_per_node * own_bytes, ranks_per_node, comm)
    return num_bytes // ranks_per_node if fits else 0


def _caches(config: Config, needs: CacheBytes, ranks_per_node: int, state_bytes: int) -> CacheBytes:
    """Return the sizes of the caches. A GPU's memory size is unknown here, so its auto caches have size 0."""
    available = 0 if config.run.device == "cuda" else available_bytes() - ranks_per_node * state_bytes
    parameters, gradients = config.comm.parameter_cache_bytes, config.comm.gradient_cache_bytes
    comm = CommConfig(
        parameter_cache_bytes=min(parameters, needs.parameters) if isinstance(parameters, int) else "auto",
        gradient_cache_bytes=min(gradients, needs.gradients) if isinstance(gradients, int) else "auto",
    )
    return auto_cache_bytes(available, ranks_per_node, needs, comm)


def _activation_bytes(config: Config, model: MetaModel, dtype: torch.dtype, lengths: Sequence[int]) -> tuple[int, int]:
    """Return the bytes that autograd saves in the forward pass of a microbatch, and the bytes of its logits."""
    num_tokens, text = sum(lengths), model.module.config.get_text_config()
    narrow = dtype.itemsize < 4
    logits = min(num_tokens * model.vocab_size, MAX_ELEMENTS[config.run.device])
    logits *= 4 * _LOGITS_COPIES + (dtype.itemsize if narrow else 0)
    if model.module.get_output_embeddings() is None:
        logits = 0  # a reward model
    elif narrow and not model.adapter:
        logits += 4 * model.vocab_size * text.hidden_size  # the gradient of the head is summed in fp32
    per_token = _saved_bytes_per_token(model, dtype)
    if per_token is None:
        per_token = _FORMULA_BYTES * text.hidden_size * model.num_layers * dtype.itemsize / 2
    if config.model.gradient_checkpointing is True:
        per_token = per_token / model.num_layers + text.hidden_size * model.num_layers * dtype.itemsize
    activations = per_token * num_tokens
    if config.model.attn_implementation == "eager" or model.packing.soft_caps:
        # Scores before and after the softmax, and their mask, of all layers.
        heads = getattr(text, "num_attention_heads", 1)
        activations += model.num_layers * heads * sum(n * n for n in lengths) * (2 * 4 + 1)
    return round(activations), logits


def _saved_bytes_per_token(model: MetaModel, dtype: torch.dtype) -> float | None:
    """Return the bytes per token that autograd saves, or None if the model cannot run on the meta device."""
    module = model.module.train()
    if not model.adapter:  # otherwise, the parameters have their types already
        for parameter in module.parameters():
            parameter.data = parameter.data.to(dtype)
    parameters = {p.untyped_storage()._cdata for p in module.parameters()}
    saved: dict[int, Any] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.is_meta and (storage := tensor.untyped_storage())._cdata not in parameters:
            saved[storage._cdata] = storage  # kept alive, so that no other storage gets its address
        return tensor

    try:
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            module(**trial_inputs([_NUM_TOKENS], packs=model.packing.packs))
    except Exception:  # a forward on the meta device raises exceptions of many kinds, for example in routers
        return None
    return sum(storage.nbytes() for storage in saved.values()) / _NUM_TOKENS
