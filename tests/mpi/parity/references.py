"""What a case has to agree with: losses and parameters in plain torch, on one process."""

import copy
import itertools
import tempfile

import diloco_reference
import torch
import torch_reference
import transformers
from plain_objectives import OBJECTIVES
from small_training import dependencies, first_minibatches, freeze_parameters, plain_loop

from odc_mpi.training import source
from odc_mpi.training.inputs import open_inputs

PREFIX = "base_model.model."
#: References by all that they depend on: many rows differ in what must not change them.
_references = {}


def find_reference(case, config, inputs, size, names):
    """Return losses, parameters, the objective and the trained model; not to be written to. `names`: of parameters."""
    depends = dependencies(config), case.freeze
    apart = (repr(config.islands), size) if config.islands.train_apart else None
    packs = (size, repr(config.data), config.model.param_dtype) if case.microbatches else None
    if (key := (depends, apart, packs)) not in _references:
        _references[key] = _compute(case, config, inputs, size, names)
    return _references[key]


def _compute(case, config, inputs, size, names):
    if case.microbatches:
        return *peft_on_microbatches(config, inputs, size), None, None
    if (case.objective, config.lora.r, config.model.path, config.islands.train_apart) == ("sft", None, None, False):
        return *plain_loop(config, inputs.dataset, case.freeze), OBJECTIVES["sft"](config, None), None
    model = peft_model(config, inputs) if config.lora.r else _first_model(config)
    freeze_parameters(model, case.freeze)
    objective = OBJECTIVES[case.objective](config, copy.deepcopy(model))
    if config.islands.train_apart:
        minibatches = diloco_reference.island_minibatches(config, size // config.islands.by)
        return *diloco_reference.train(model, names, inputs.dataset, minibatches, config, objective), objective, None
    loss = _loss_with_routers if (config.model.config or {}).get("output_router_logits") else objective.loss
    minibatches = first_minibatches(config, inputs.dataset)
    losses = torch_reference.train(model, inputs.dataset, minibatches, config.optim, loss)
    return losses, trained_in(model) if config.lora.r else model.state_dict(), objective, model


def _first_model(config):
    if not config.model.path:
        return torch_reference.initial_model(config)
    kind = transformers.AutoModelForCausalLM
    model = kind.from_pretrained(config.model.path, attn_implementation="sdpa", **config.model.config or {})
    return model.train()  # as in `torch_reference.in_4_bits`


def _loss_with_routers(module, dataset, indices):
    """The loss of transformers for a minibatch of one sequence, as that of routers is computed per microbatch."""
    tokens, mask = map(torch.from_numpy, dataset[indices[0]])
    return module(input_ids=tokens[None], labels=tokens.where(mask, -100)[None], use_cache=False).loss


def peft_model(config, inputs, attention="sdpa"):
    """peft's own model on one process, with the same first values."""
    model, dtype = _first_model(config), getattr(torch, config.model.param_dtype)
    for parameter in filter(torch.is_floating_point, model.parameters()):  # `to` would round rotary frequencies, too
        parameter.data = parameter.to(dtype)
    if config.model.load_in_4bit:
        with tempfile.TemporaryDirectory() as path:
            settings = config.model.bnb_4bit_quant_type, config.model.bnb_4bit_use_double_quant
            model = torch_reference.in_4_bits(model, path, dtype, *settings)
    model.set_attn_implementation(attention)
    lora = dict(vars(config.lora))
    settings = {f"lora_{name}": lora.pop(name) for name in ("alpha", "dropout")}
    return torch_reference.with_adapters(model, inputs.model.weights, **lora, **settings)


def trained_in(model):
    return {name.removeprefix(PREFIX): p.detach() for name, p in model.named_parameters() if p.requires_grad}


def peft_on_microbatches(config, inputs, size):
    """Losses and adapters of a plain loop over the microbatches of all ranks, each seeded as a run seeds it."""
    model, optim = peft_model(config, inputs, "odc_packed").train(), config.optim
    optimizer, losses = torch_reference.make_optimizer(model, optim), []
    for group in optimizer.param_groups:
        group["lr"] = optim.learning_rate
    loaders = (open_inputs(config, rank, size).loader for rank in range(size))
    for of_ranks in itertools.islice(zip(*loaders, strict=True), config.run.steps):
        total = 0.0
        for minibatch in of_ranks:
            for batch in minibatch:
                torch.manual_seed(source._seed(config.run.seed, minibatch.data_epoch, int(batch.indices[0])))
                loss = model(**batch.inputs).loss * (batch.num_tokens / minibatch.num_tokens)
                loss.backward()
                total += loss.item()
        torch.nn.utils.clip_grad_norm_(model.parameters(), optim.max_grad_norm)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
    return losses, trained_in(model)
