"""DiLoCo in plain torch: replicas of a model in one process, each with its own part of every minibatch."""

import copy
import itertools

import torch
import torch_reference
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from odc_mpi.data.loader import Part
from odc_mpi.training.inputs import open_inputs
from odc_mpi.training.update import schedule_factor


def island_minibatches(config, num_islands):
    """The indices of the sequences of each island in each step."""
    loaders = [open_inputs(config, 0, 1, Part(island, num_islands)).sequence_loader for island in range(num_islands)]
    return [
        [batch.indices for batch in batches]
        for batches in itertools.islice(zip(*loaders, strict=True), config.run.steps)
    ]


def fragment_numbers(parameters, num_fragments):
    """The fragment of each element of the concatenated parameters."""
    padded = [-(-p.numel() // 32) * 32 for p in parameters]
    bounds = torch.tensor([sum(padded) // 32 * i // num_fragments * 32 for i in range(1, num_fragments + 1)])
    starts = itertools.accumulate(padded, initial=0)
    positions = [torch.arange(p.numel()) + start for p, start in zip(parameters, starts, strict=False)]
    return torch.searchsorted(bounds, torch.cat(positions), right=True)


def train(module, names, dataset, minibatches, config, objective):
    """Train a replica per island. Returns the mean losses of the steps, and the outer parameters by name."""
    optim, islands = config.optim, config.islands
    replicas = [copy.deepcopy(module) for _ in minibatches[0]]
    parameters = [[dict(replica.named_parameters())[name] for name in names] for replica in replicas]
    optimizers = [torch_reference.make_optimizer(replica, optim) for replica in replicas]
    outer = parameters_to_vector(parameters[0]).detach()
    velocity = torch.zeros_like(outer)
    numbers, period = fragment_numbers(parameters[0], islands.fragments), islands.sync_every // islands.fragments
    weights, sent = torch.zeros(islands.fragments, len(replicas), dtype=torch.float64), {}
    losses = []

    def send(number):
        shares = (weights[number] / weights[number].sum()).tolist()
        weights[number] = 0
        sent[number] = sum(
            w * (outer - parameters_to_vector(inner).detach()) for w, inner in zip(shares, parameters, strict=True)
        )

    @torch.no_grad()
    def apply(number):
        mask, mean = numbers == number, sent.pop(number)
        velocity[mask] = (islands.outer_momentum * velocity + mean)[mask]
        outer[mask] -= (islands.outer_learning_rate * (mean + islands.outer_momentum * velocity))[mask]
        for inner in parameters:
            local = parameters_to_vector(inner)
            shared = islands.local_share * local + (1 - islands.local_share) * outer
            vector_to_parameters(torch.where(mask, shared, local), inner)

    for step, parts in enumerate(minibatches, 1):
        counts = [sum(int(dataset.num_trained_tokens[i]) for i in part) for part in parts]
        step_loss, amounts = 0.0, [sum(objective.amount(dataset, i) for i in part) for part in parts]
        for replica, optimizer, part, count in zip(replicas, optimizers, parts, counts, strict=True):
            factor = schedule_factor(optim.lr_scheduler_type, step - 1, optim.warmup_steps, len(minibatches))
            for group in optimizer.param_groups:
                group["lr"] = optim.learning_rate * factor
            optimizer.zero_grad()
            loss = objective.loss(replica, dataset, part)
            loss.backward()
            if optim.max_grad_norm:
                torch.nn.utils.clip_grad_norm_(replica.parameters(), optim.max_grad_norm)
            optimizer.step()
            step_loss += loss.item() * count / sum(counts)
        losses.append(step_loss)
        weights += torch.tensor(amounts)
        if (step + islands.delay) % period == 0:
            send(((step + islands.delay) // period - 1) % islands.fragments)
        if step % period == 0:
            apply((step // period - 1) % islands.fragments)
    for number in list(sent):  # in flight
        apply(number)
    for number in range(islands.fragments):  # the mean of the replicas at the end
        if weights[number].sum():
            send(number)
            outer[numbers == number] -= sent.pop(number)[numbers == number]
    slices = zip(parameters[0], outer.split([p.numel() for p in parameters[0]]), strict=True)
    return losses, dict(zip(names, (slice_.view(p.shape) for p, slice_ in slices), strict=True))
