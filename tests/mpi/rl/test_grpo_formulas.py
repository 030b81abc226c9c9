"""Loss and gradient of given rollouts against formulas in plain torch, in float64 but for transformers' norms."""

from itertools import chain
from unittest.mock import patch

import numpy as np
import peft
import pytest
import torch
import torch_reference
from grpo_job import END, MAX_LENGTH, NUM_GENERATIONS, distillation, make_settings, only_reward, read_prompt_tokens
from small_training import training
from transformers import AutoModelForCausalLM

from odc_mpi.rollout.decode import PromptBatch
from odc_mpi.rollout.sampling import PromptCompletions
from odc_mpi.training.inputs import open_inputs
from odc_mpi.training.recipes.rollouts import source

pytestmark = pytest.mark.mpi

TEMPERATURE = 0.8
#: What the first step changes sets policy and reference apart in the second.
STEPS = 2
PROMPTS_PER_STEP = 5
SETTINGS = {
    "rl__temperature": TEMPERATURE,
    "data__minibatch_sequences": PROMPTS_PER_STEP * NUM_GENERATIONS,
    "run__steps": STEPS,
    "optim__optimizer": "sgd",
    "optim__learning_rate": 0.3,
    "optim__warmup_steps": 0,
    "optim__weight_decay": 0.0,
    "optim__max_grad_norm": 1e9,
}


def given_completions(index):
    """Tokens of the completions of a prompt, and whether each has come to its end."""
    draws = np.random.default_rng((11, index))
    lengths = draws.integers(1, MAX_LENGTH + 1, size=NUM_GENERATIONS)
    tokens = [draws.integers(0, END, size=length).tolist() for length in lengths]
    stopped = [length < MAX_LENGTH or bool(draws.integers(2)) for length in lengths]
    return [
        [*completion[:-1], END] if ended else completion for completion, ended in zip(tokens, stopped, strict=True)
    ], stopped


class GivenCompletions(PromptBatch):
    """Batch that delivers given completions in place of generated ones."""

    num_free = 100

    def add(self, prompts, step):
        self.prompts |= prompts

    def step(self, step, on_token):
        for key, prompt in self.prompts.items():
            tokens, stopped = given_completions(prompt.number)
            logps, steps = ([np.zeros(len(each), dtype) for each in tokens] for dtype in (np.float32, np.int64))
            self._on_prompt_done(key, PromptCompletions(tokens, logps, stopped, 0.0, [each + step for each in steps]))
        self.prompts.clear()


def train(world, config):
    """Train; return for each step the metrics, the full gradients and the parameters before it."""
    steps, inputs = [], open_inputs(config, world.rank, world.size)
    with (
        patch.object(source, "prompt_batch", GivenCompletions),
        training(config, world, inputs) as (trainer, _),
        trainer,
    ):
        model, divide, gradients = trainer.model, trainer.model.divide_gradients_, []

        def divide_and_keep(divisor):
            divide(divisor)
            named = model.named_shard_parameters()
            gradients.append({name: p.grad.double().numpy().copy() for name, p in named if p.grad is not None})

        model.divide_gradients_ = divide_and_keep
        for _ in range(STEPS):
            before = {name: value.clone() for name, value in model.state_dict().items()}
            metrics, of_ranks = trainer.step(), world.gather_objects(gradients.pop())
            names = {name for each in of_ranks for name in each}
            gradient = {name: np.concatenate([each[name] for each in of_ranks if name in each]) for name in names}
            steps.append((metrics, gradient, before))
    return steps


def compute_rewards(index, wanted, only_even):
    """Return the values of grpo_job.REWARDS for the given completions, None where nothing applies."""
    found = []
    for tokens in given_completions(index)[0]:
        even = None if tokens[0] % 7 == 0 else float(sum(token % 2 == wanted for token in tokens))
        found.append(even if only_even else -0.5 * len(tokens) / 4 + (even or 0.0))
    return found


def compute_advantages(rewards, scale):
    there = torch.tensor([reward for reward in rewards if reward is not None], dtype=torch.float64)
    if len(there) < 2 or (there == there[0]).all():
        return [0.0] * len(rewards)
    divisor = there.std() + 1e-4 if scale == "group" else 1.0
    return [0.0 if reward is None else float((reward - there.mean()) / divisor) for reward in rewards]


def compute_logps(model, prompt, completion):
    ids = torch.tensor([[*prompt, *completion]])
    logits = model(input_ids=ids, use_cache=False).logits[0, len(prompt) - 1 : -1].double() / TEMPERATURE
    return torch.log_softmax(logits, -1).gather(1, torch.tensor(completion)[:, None])[:, 0]


def compute_terms(policy, reference, rl, row, index, only_even):
    """The losses of the tokens of each completion, and the estimates of the KL divergence."""
    tokens, stopped = given_completions(index)
    advantages = compute_advantages(compute_rewards(index, row.columns["wanted"], only_even), rl.scale_rewards)
    for completion, ended, advantage in zip(tokens, stopped, advantages, strict=True):
        if rl.mask_truncated_completions and not ended:
            continue
        logps = compute_logps(policy, row.tokens, completion)
        if rl.teacher_path:
            with torch.no_grad():
                kl = logps - compute_logps(reference, row.tokens, completion)
            yield torch.exp(logps - logps.detach()) * kl, kl
            continue
        losses, kl = -torch.exp(logps - logps.detach()) * advantage, torch.zeros(1)
        if rl.beta:
            with torch.no_grad():
                reference_logps = compute_logps(reference, row.tokens, completion)
            kl = torch.exp(reference_logps - logps) - (reference_logps - logps) - 1
            losses = losses + rl.beta * kl
        yield losses, kl


def formula(policy, reference, rl, prompts, indices, only_even):
    """Loss, size of what it is the sum of, mean of the KL divergence, and gradients by name."""
    terms = list(chain.from_iterable(compute_terms(policy, reference, rl, prompts[i], i, only_even) for i in indices))
    if rl.scale_rewards == "batch":
        rewards = chain.from_iterable(compute_rewards(i, prompts[i].columns["wanted"], only_even) for i in indices)
        std = np.std([reward for reward in rewards if reward is not None], ddof=1) + 1e-4
        terms = [(losses / std, kl) for losses, kl in terms]
    num_tokens, num_completions = sum(len(losses) for losses, _ in terms), len(indices) * NUM_GENERATIONS
    if rl.loss_type == "grpo":
        parts = [losses / len(losses) / num_completions for losses, _ in terms]
    else:
        parts = [
            losses / (num_tokens if rl.loss_type == "dapo" else num_completions * MAX_LENGTH) for losses, _ in terms
        ]
    loss = torch.cat(parts).sum()
    trained = {name: p for name, p in policy.named_parameters() if p.requires_grad}
    gradients = dict(zip(trained, torch.autograd.grad(loss, list(trained.values())), strict=True))
    size, kl = torch.cat(parts).detach().abs().sum(), torch.cat([kl.detach() for _, kl in terms]).mean()
    return loss.item(), size.item(), kl.item(), gradients


def plain_model(config, state=None):
    """A plain model in float64, with adapters if the run has them, of the parameters `state`."""
    model = torch_reference.initial_model(config)
    if state is not None and config.lora.r is not None:
        lora = config.lora
        settings = peft.LoraConfig(r=lora.r, lora_alpha=lora.alpha, target_modules=lora.target_modules)
        peft.inject_adapter_in_model(settings, model)
    if state is not None:
        model.load_state_dict(state)
    return model.double()


def case(*sizes, **settings):
    return pytest.param(settings, marks=pytest.mark.sizes(*sizes), id="-".join(map(str, settings.values())))


CASES = [
    case(3, loss_type="dapo"),
    case(2, loss_type="dapo", scale_rewards="none", mask_truncated_completions=True, beta=0.1, only="even"),
    case(2, loss_type="dapo", beta=0.3, adapters=True),
    case(2, 3, loss_type="grpo", scale_rewards="batch", only="even"),
    case(2, loss_type="grpo", scale_rewards="none", beta=0.1),
    case(3, loss_type="grpo", mask_truncated_completions=True, beta=0.1, adapters=True, only="even"),
    case(2, 3, loss_type="dr_grpo", mask_truncated_completions=True, beta=0.1),
]


@pytest.mark.parametrize("settings", CASES)
def test_losses_and_gradients_are_those_of_the_formulas(world, grpo_dir, settings):
    """Also with only the reward that may be None."""
    rl = {"scale_rewards": "group", "beta": 0.0} | settings
    adapters, only_even = rl.pop("adapters", False), "only" in rl
    changes = SETTINGS | (only_reward(grpo_dir, rl.pop("only")) if only_even else {})
    changes |= {f"rl__{name}": value for name, value in rl.items()}
    if adapters:
        changes |= {"lora__r": 4, "lora__alpha": 16, "optim__learning_rate": 3.0}
    config = make_settings(grpo_dir, **changes)
    steps = train(world, config)
    if world.rank == 0:
        prompts = read_prompt_tokens(grpo_dir)
        order = np.random.default_rng([config.run.seed, 0]).permutation(len(prompts)).tolist()
        reference = plain_model(config)
        for number, (metrics, gradient, before) in enumerate(steps):
            indices = order[number * PROMPTS_PER_STEP : (number + 1) * PROMPTS_PER_STEP]
            wanted = formula(plain_model(config, before), reference, config.rl, prompts, indices, only_even)
            check(metrics, gradient, wanted, config.rl.beta and number)
    world.gather_objects(None)


@pytest.mark.sizes(1, 2, 3)
def test_distillation_is_that_of_the_formula(world, grpo_dir, teacher_dir):
    """Without reward functions, and with a single completion per prompt."""
    changes = dict.fromkeys(("rl__reward_funcs", "rl__reward_weights"))
    config = make_settings(grpo_dir, **SETTINGS | distillation(teacher_dir), **changes)
    steps = train(world, config)
    if world.rank == 0:
        prompts, teacher = read_prompt_tokens(grpo_dir), AutoModelForCausalLM.from_pretrained(teacher_dir).double()
        order = np.random.default_rng([config.run.seed, 0]).permutation(len(prompts)).tolist()
        for number, (metrics, gradient, before) in enumerate(steps):
            indices = order[number * PROMPTS_PER_STEP : (number + 1) * PROMPTS_PER_STEP]
            wanted = formula(plain_model(config, before), teacher, config.rl, prompts, indices, False)
            assert metrics["reward"] is None and metrics["frac_reward_zero_std"] == 0
            check(metrics, gradient, wanted, False)
    world.gather_objects(None)


def check(metrics, gradient, wanted, has_diverged):
    """Compare a step with the formulas, to 2e-6 of the gradient's norm: who trains what, and so rounding, varies."""
    loss, size, kl, gradients = wanted
    assert abs(metrics["loss"] - loss) <= 1e-6 * size
    norm = float(torch.cat([value.flatten() for value in gradients.values()]).norm())
    assert metrics["grad_norm"] == pytest.approx(norm, rel=1e-6)
    assert norm > 1e-3
    differences = [
        np.linalg.norm(gradient.get(name, np.zeros(value.numel())) - value.flatten().numpy())
        for name, value in gradients.items()
    ]
    assert np.linalg.norm(differences) <= 2e-6 * norm
    if "kl" in metrics:
        assert metrics["kl"] == pytest.approx(kl, rel=1e-5, abs=1e-6)
        assert not has_diverged or kl > 1e-5
