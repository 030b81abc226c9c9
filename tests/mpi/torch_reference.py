"""The second implementation: plain torch and transformers on one process, one sequence at a time, no packing."""

import torch
import torch.nn.functional as F
import transformers

from odc_mpi.models import build
from odc_mpi.models.heads import CAUSAL_LM, REWARD, prediction_task
from odc_mpi.training.update import schedule_factor


def initial_model(config):
    """The plain model with which a run of this configuration begins."""
    task = REWARD if config.run.objective == "reward" else CAUSAL_LM
    return unsharded_model(build.from_config(config.model.config, config.run.seed, task=task), config.model.config)


def unsharded_model(meta_model, settings):
    """The same model with ordinary parameters and the stock attention, holding the same initial values."""
    plain = prediction_task(type(meta_model.module).__name__).auto_class.from_config(
        transformers.AutoConfig.for_model(**settings, num_labels=1), attn_implementation="sdpa", dtype=torch.float32
    )
    with torch.no_grad():
        for name, parameter in plain.named_parameters():
            parameter.copy_(meta_model.weights.read(name, 0, parameter.numel()).view(parameter.shape))
    return plain


def in_4_bits(model, path, dtype, quant_type="nf4", double_quant=True):
    """The model as transformers quantizes it with bitsandbytes. It is written to `path` first."""
    model.save_pretrained(path)
    settings = transformers.BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type=quant_type,
        bnb_4bit_use_double_quant=double_quant,
        bnb_4bit_compute_dtype=dtype,
    )
    quantized = type(model).from_pretrained(path, dtype=dtype, quantization_config=settings, device_map="cpu")
    return quantized.train()  # otherwise it computes with other kernels, which fail for small layers


def with_adapters(model, weights, **lora):
    """Add peft's own adapters to a model of transformers, with the initial values of a run."""
    import peft  # takes a second

    model = peft.get_peft_model(model, peft.LoraConfig(task_type="CAUSAL_LM", **lora))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                first = weights.read(name.removeprefix("base_model.model."), 0, parameter.numel())
                parameter.copy_(first.view(parameter.shape))
    return model


def compute_loss(module, dataset, indices):
    """The mean loss over all trained tokens of some sequences, each by itself."""
    total, count = 0.0, 0
    for index in indices:
        tokens, mask = dataset[index]
        tokens, mask = torch.from_numpy(tokens), torch.from_numpy(mask)[1:]
        logits = module(input_ids=tokens[None, :-1], use_cache=False).logits[0]
        losses = F.cross_entropy(logits, tokens[1:], reduction="none")
        total = total + losses[mask].sum()
        count += int(mask.sum())
    return total / count


def make_optimizer(module, optim):
    """The trainer's optimizer for all trainable parameters of a plain model."""
    decayed = [p for p in module.parameters() if p.dim() >= 2 and p.requires_grad]
    others = [p for p in module.parameters() if p.dim() < 2 and p.requires_grad]
    groups = [{"params": decayed, "weight_decay": optim.weight_decay}, {"params": others, "weight_decay": 0.0}]
    if optim.optimizer == "sgd":
        return torch.optim.SGD(groups, lr=0.0, momentum=optim.momentum)
    return torch.optim.AdamW(groups, lr=0.0, betas=(optim.adam_beta1, optim.adam_beta2), eps=optim.adam_epsilon)


def train(module, dataset, minibatches, optim, compute_loss=compute_loss):
    """The losses of a plain loop with the trainer's optimizer settings."""
    optimizer, losses = make_optimizer(module, optim), []
    for step, indices in enumerate(minibatches):
        factor = schedule_factor(optim.lr_scheduler_type, step, optim.warmup_steps, len(minibatches))
        for group in optimizer.param_groups:
            group["lr"] = optim.learning_rate * factor
        optimizer.zero_grad()
        loss = compute_loss(module, dataset, indices)
        loss.backward()
        if optim.max_grad_norm:
            torch.nn.utils.clip_grad_norm_(module.parameters(), optim.max_grad_norm)
        optimizer.step()
        losses.append(loss.item())
    return losses
