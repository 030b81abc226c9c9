"""Objectives in plain torch, which computes each sequence, answer and mismatched answer by itself."""

from typing import ClassVar

import torch
import torch_reference
from pair_files import answer_rows
from torch.nn.functional import logsigmoid

from odc_mpi.data.dataset.reader import Dataset


def with_held_out(*names):
    return {f"{prefix}{name}" for prefix in ("", "eval_") for name in names}


class PlainObjective:
    """The loss of some sequences of a data set and its metrics under a model that began as `frozen`.

    `data` is the fixture of its data, `settings` are those of a run, and `series` has metrics of the steps so far.
    """

    data: ClassVar = "dataset_path"
    settings: ClassVar = {}
    #: Metrics of a training whose values are not those of `metrics`.
    exact_names: ClassVar = {"loss", "eval_loss", "fixed64_relative_error"}

    def __init__(self, config, frozen):
        self.config, self.frozen, self.series = config, frozen, {}

    def loss(self, module, dataset, indices):
        return torch_reference.compute_loss(module, dataset, indices)

    def amount(self, dataset, index):
        """The weight of a sequence where islands merge."""
        return int(dataset.num_trained_tokens[index])

    def metrics(self, module, dataset, indices):
        correct = trained = 0
        for tokens, mask in (map(torch.from_numpy, dataset[index]) for index in indices):
            right = module(input_ids=tokens[None], use_cache=False).logits[0, :-1].argmax(-1) == tokens[1:]
            correct, trained = correct + int(right[mask[1:].bool()].sum()), trained + int(mask[1:].sum())
        return {"loss": self.loss(module, dataset, indices), "mean_token_accuracy": torch.tensor(correct / trained)}

    @torch.no_grad()
    def held_out(self, module, data):
        with Dataset(data.eval_path) as dataset:
            found = self.metrics(module, dataset, range(data.eval_sequences or len(dataset)))
        return {f"eval_{name}": value.item() for name, value in found.items()}


def answer_logp(module, row, num_prompt):
    logps = module(input_ids=row[None, :-1], use_cache=False).logits[0].log_softmax(-1)
    return logps.gather(1, row[1:, None])[num_prompt - 1 :].double().sum()


class PlainDPO(PlainObjective):
    data: ClassVar = "pairs_path"
    settings: ClassVar = {"run.objective": "dpo"}
    exact_names: ClassVar = with_held_out(
        "loss", "rewards/chosen", "rewards/rejected", "rewards/margins", "rewards/accuracies", "logps/chosen"
    )

    def logps(self, module, dataset, indices):
        """The log-probabilities of both answers of each pair, `[pairs, 2]`."""
        counts = [count for count in dataset.columns["num_prompt_tokens"][list(indices)] for _ in range(2)]
        rows = answer_rows(dataset, indices)
        found = [answer_logp(module, row, count) for row, count in zip(rows, counts, strict=True)]
        return torch.stack(found).reshape(-1, 2)

    def ratios(self, module, dataset, indices):
        with torch.no_grad():
            reference = self.logps(self.frozen, dataset, indices)
        return (found := self.logps(module, dataset, indices)) - reference, found

    def loss(self, module, dataset, indices):
        ratios, _ = self.ratios(module, dataset, indices)
        return -logsigmoid(self.config.dpo.beta * (ratios[:, 0] - ratios[:, 1])).mean()

    def metrics(self, module, dataset, indices):
        ratios, logps = self.ratios(module, dataset, indices)
        rewards = self.config.dpo.beta * ratios
        margins = rewards[:, 0] - rewards[:, 1]
        return {
            "loss": -logsigmoid(margins).mean(),
            "rewards/chosen": rewards[:, 0].mean(),
            "rewards/rejected": rewards[:, 1].mean(),
            "rewards/margins": margins.mean(),
            "rewards/accuracies": (margins.sign() + 1).mean() / 2,
            "logps/chosen": logps[:, 0].mean(),
            "logps/rejected": logps[:, 1].mean(),
        }


class PlainKTO(PlainObjective):
    data: ClassVar = "labels_path"
    settings: ClassVar = {
        "run.objective": "kto",
        "kto.beta": 0.5,
        "kto.desirable_weight": 1.3,
        "kto.undesirable_weight": 0.7,
        "optim.learning_rate": 0.02,
    }
    exact_names: ClassVar = PlainDPO.exact_names - {"rewards/accuracies", "eval_rewards/accuracies"} | {"kl", "eval_kl"}

    def ratios(self, module, dataset, prompts, answers):
        """The log-ratios of answers to prompts that they follow, and their log-probabilities."""
        counts, found = dataset.columns["num_prompt_tokens"], []
        for prompt, answer in zip(prompts, answers, strict=True):
            parts = dataset[prompt][0][: counts[prompt]], dataset[answer][0][counts[answer] :]
            row = torch.cat([torch.from_numpy(part) for part in parts])
            with torch.no_grad():
                reference = answer_logp(self.frozen, row, counts[prompt])
            own = answer_logp(module, row, counts[prompt])
            found.append(torch.stack([own - reference, own]))
        return torch.stack(found).unbind(1)

    @torch.no_grad()
    def estimate(self, module, dataset, indices):
        if self.config.kto.loss_type != "kto":
            return torch.zeros(())
        return self.ratios(module, dataset, indices, [indices[-1], *indices[:-1]])[0].mean().clamp(min=0)

    def answer_losses(self, dataset, indices, ratios, kl):
        kto, desirable = self.config.kto, torch.from_numpy(dataset.columns["label"] == 1)[list(indices)]
        weights = torch.where(desirable, kto.desirable_weight, kto.undesirable_weight)
        return weights * (1 - torch.sigmoid(kto.beta * torch.where(desirable, 1, -1) * (ratios - kl))), desirable

    def loss(self, module, dataset, indices):
        kl = self.estimate(module, dataset, indices)
        if self.config.kto.loss_type == "kto":
            self.series.setdefault("kl", []).append(kl.item())
        return self.answer_losses(dataset, indices, self.ratios(module, dataset, indices, indices)[0], kl)[0].mean()

    def amount(self, dataset, index):
        return 1

    def metrics(self, module, dataset, indices):
        kl, (ratios, logps) = self.estimate(module, dataset, indices), self.ratios(module, dataset, indices, indices)
        losses, desirable = self.answer_losses(dataset, indices, ratios, kl)
        means = [(self.config.kto.beta * ratios[kind].mean(), logps[kind].mean()) for kind in (desirable, ~desirable)]
        chosen, rejected = means
        return {
            "loss": losses.mean(),
            **({"kl": kl} if self.config.kto.loss_type == "kto" else {}),
            "rewards/chosen": chosen[0],
            "rewards/rejected": rejected[0],
            "rewards/margins": chosen[0] - rejected[0],
            "logps/chosen": chosen[1],
            "logps/rejected": rejected[1],
        }


class PlainReward(PlainObjective):
    data: ClassVar = "pairs_path"
    settings: ClassVar = {
        "run.objective": "reward",
        "reward.center_rewards_coefficient": 0.3,
        "model.config.pad_token_id": 0,
    }
    exact_names: ClassVar = with_held_out("loss", "accuracy", "margin", "min_reward", "mean_reward", "max_reward")

    def loss(self, module, dataset, indices):
        return self.metrics(module, dataset, indices)["loss"]

    def metrics(self, module, dataset, indices):
        rows = answer_rows(dataset, indices)
        rewards = torch.cat([module(input_ids=row[None], use_cache=False).logits for row in rows]).double()
        margins, center = (rewards[::2] - rewards[1::2])[:, 0], self.config.reward.center_rewards_coefficient
        squares = (rewards[::2] + rewards[1::2])[:, 0] ** 2
        return {
            "loss": (-logsigmoid(margins) + center * squares).mean(),
            "accuracy": (margins > 0).double().mean(),
            "margin": margins.mean(),
            "min_reward": rewards.min(),
            "mean_reward": rewards.mean(),
            "max_reward": rewards.max(),
        }


class GRPO(PlainObjective):
    """Has its reference in the formulas of `tests/mpi/rl`; here only bits are compared."""

    data: ClassVar = "grpo_dir"
    settings: ClassVar = {
        "run.steps": 3,
        "optim.optimizer": "adamw",
        "optim.adam_epsilon": 1e-8,
        "optim.learning_rate": 3e-3,
    }
    exact_names: ClassVar = {"loss", "reward", "entropy", "grad_norm", "num_tokens"}


OBJECTIVES = {"grpo": GRPO, "sft": PlainObjective, "dpo": PlainDPO, "kto": PlainKTO, "reward": PlainReward}
