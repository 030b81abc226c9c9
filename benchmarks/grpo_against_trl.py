"""Compare losses and gradients of `run.objective: grpo` with those of TRL's GRPOTrainer on the same rollouts.

    mpiexec -n 2 python benchmarks/grpo_against_trl.py ours FOLDER
    TRL_PYTHON benchmarks/grpo_against_trl.py trl FOLDER

TRL_PYTHON is the Python of an environment with trl and the same torch and transformers; it needs no MPI. The first
command trains two steps for each case on random completions, which are not generated, and writes the model, the policy
before the second step (which then differs from the reference), the rollouts, and the loss and gradient of that step.
The second one passes the rollouts to TRL as its `rollout_func`, so that rewards, advantages, masks and loss are TRL's,
and prints a row for each case: the difference of the losses relative to the sum of the magnitudes of all tokens'
losses, and the norm of the difference of the gradients relative to the gradient's norm.
"""

import argparse
import json
import random
import sys
import warnings
from importlib.metadata import version
from itertools import count
from pathlib import Path
from typing import Any

NUM_PROMPTS, NUM_GENERATIONS, MAX_LENGTH = 6, 8, 24
VOCAB, END, PAD = 64, 60, 61
TEMPERATURE, WEIGHTS = 0.9, (0.5, 1.0)
MODEL = {
    "model_type": "qwen2",
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "tie_word_embeddings": True,
    "eos_token_id": END,
    "pad_token_id": PAD,
}
#: loss_type, scale_rewards, mask_truncated_completions, beta
CASES = [
    (loss_type, scale, masked, beta)
    for loss_type in ("dapo", "grpo", "dr_grpo")
    for scale, masked, beta in (("group", False, 0.0), ("none", False, 0.0), ("group", True, 0.0), ("none", True, 0.1))
]


def shorter(completion_ids: list[list[int]], **columns: Any) -> list[float | None]:
    """Reward short completions."""
    return [-len(tokens) / 4 for tokens in completion_ids]


def even(completion_ids: list[list[int]], **columns: Any) -> list[float | None]:
    """Reward even tokens; not applicable to completions that begin with certain tokens."""
    return [None if tokens[0] % 5 == 0 else float(sum(t % 2 == 0 for t in tokens)) for tokens in completion_ids]


def prompts() -> list[str]:
    """Return the prompts, all different."""
    draws = random.Random(1)
    return [
        f"{i} " + " ".join(str(draws.randrange(60)) for _ in range(draws.randint(1, 9))) for i in range(NUM_PROMPTS)
    ]


def completions(prompt: int) -> list[list[int]]:
    """Return the tokens of a prompt's completions, about a quarter of them truncated."""
    draws = random.Random(f"completions of {prompt}")
    found = [[draws.randrange(60) for _ in range(draws.randint(1, MAX_LENGTH))] for _ in range(NUM_GENERATIONS)]
    return [tokens if draws.random() < 0.25 else [*tokens[:-1], END] for tokens in found]


def ours(folder: Path) -> None:
    """Train with odc_mpi, and write the files for the comparison with TRL. Collective."""
    import numpy as np
    import torch

    from odc_mpi.rollout.sample import PromptCompletions
    from odc_mpi.runtime.world import World
    from odc_mpi.training.inputs import open_inputs
    from odc_mpi.training.resolved_settings import with_device
    from odc_mpi.training.rl.source import RolloutSource
    from odc_mpi.training.run import build_trainer, decide
    from odc_mpi.training.settings import load

    def give(module: Any, asked: Any, sampling: Any, deliver: Any, progress: Any) -> None:
        for i, prompt in enumerate(asked):
            tokens = completions(prompt.number)
            logps = [np.zeros(len(own), np.float32) for own in tokens]
            deliver(i, PromptCompletions(tokens, logps, [own[-1] == END for own in tokens], 0.0))

    with World() as world:
        torch.set_num_threads(1)
        if world.rank == 0:
            _prepare(folder)
        world.gather_objects(None)
        for number, (loss_type, scale, masked, beta) in enumerate(CASES):
            settings = {
                "model.path": folder / "start",
                "data.path": folder / "prompts.jsonl",
                "data.minibatch_sequences": NUM_PROMPTS * NUM_GENERATIONS,
                "data.max_tokens_per_microbatch": 150,
                "run.objective": "grpo",
                "run.steps": 2,
                "rl.reward_funcs": f"['{Path(__file__).resolve()}:shorter', '{Path(__file__).resolve()}:even']",
                "rl.reward_weights": str(list(WEIGHTS)),
                "rl.num_generations": NUM_GENERATIONS,
                "rl.max_completion_length": MAX_LENGTH,
                "rl.temperature": TEMPERATURE,
                "rl.loss_type": loss_type,
                "rl.scale_rewards": scale,
                "rl.mask_truncated_completions": str(masked).lower(),
                "rl.beta": beta,
                "optim.optimizer": "sgd",
                "optim.learning_rate": 0.1,
                "optim.lr_scheduler_type": "constant",
                "optim.max_grad_norm": 1e9,
            }
            config = with_device(load(None, [f"--{key}={value}" for key, value in settings.items()]), "cpu")
            inputs = world.run_on_all(lambda config=config: open_inputs(config, world.rank, world.size))
            with build_trainer(config, world, inputs, decide(config, world)) as trainer:
                source = next(each for each in trainer.callbacks if isinstance(each, RolloutSource))
                source._engine = give
                _two_steps(folder / f"case_{number}", world, trainer)
            trainer.model.close()


def _prepare(folder: Path) -> None:
    """Write a model, its tokenizer and the prompts."""
    import torch
    import transformers
    from tokenizers import Tokenizer, models, pre_tokenizers

    folder.mkdir(parents=True)
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(**MODEL))
    model.save_pretrained(folder / "start")
    inner = Tokenizer(models.WordLevel({str(i): i for i in range(VOCAB)}, unk_token="0"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=inner, eos_token=str(END), pad_token=str(PAD))
    tokenizer.save_pretrained(folder / "start")
    (folder / "prompts.jsonl").write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts()))


def _two_steps(folder: Path, world: Any, trainer: Any) -> None:
    """Train two steps; write the policy before the second one, and its loss and gradient. Collective."""
    import torch
    from safetensors.torch import save_file

    model, divide, kept = trainer.model, trainer.model.divide_gradients_, {}

    def divide_and_keep(divisor: float) -> None:
        divide(divisor)
        kept.update({name: p.grad.clone() for name, p in model.named_shard_parameters() if p.grad is not None})

    model.divide_gradients_ = divide_and_keep
    trainer.step()
    state = {f"policy.{name}": value.clone() for name, value in model.state_dict().items()}
    metrics = trainer.step()
    of_ranks = world.gather_objects({name: value.numpy() for name, value in kept.items()})
    if world.rank == 0:
        for name in {name for own in of_ranks for name in own}:
            whole = torch.cat([torch.from_numpy(own[name]) for own in of_ranks if name in own])
            state[f"gradient.{name}"] = whole.view(state[f"policy.{name}"].shape)
        save_file(state, folder.with_suffix(".safetensors"), {"loss": repr(metrics["loss"]), "ranks": str(world.size)})


def trl(folder: Path) -> None:
    """Compute the same with TRL, and print the differences."""
    import torch
    import transformers
    from safetensors import safe_open

    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    warnings.simplefilter("ignore")
    print("Versions: " + ", ".join(f"{name} {version(name)}" for name in ("trl", "transformers", "torch")))
    print("| `loss_type` | `scale_rewards` | masked | `beta` | loss | difference | gradient's norm | difference |")
    print("|---|---|---|---|---|---|---|---|")
    # TRL's `use_bias_correction_kl` changes the gradient of the divergence, but not its value.
    todo = [(number, False) for number in range(len(CASES))]
    todo += [(number, True) for number, case in enumerate(CASES) if case[-1]]
    for number, corrected in todo:
        with safe_open(folder / f"case_{number}.safetensors", "pt") as file:
            state = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - no mapping
            our_loss = float(file.metadata()["loss"])
        loss, size, gradients = _loss_of_trl(folder, state, number, corrected=corrected)
        norm = sum(float(gradient.square().sum()) for gradient in gradients.values()) ** 0.5
        apart = sum(
            float((gradient - state.get(f"gradient.{name}", torch.zeros(1)).double()).square().sum())
            for name, gradient in gradients.items()
        )
        loss_type, scale, masked, beta = CASES[number]
        cells = [loss_type, scale, "yes" if masked else "no", f"{beta:g}" + ", corrected" * corrected]
        cells += [f"{loss:.6f}", f"{abs(our_loss - loss) / size:.1e}", f"{norm:.4f}", f"{apart**0.5 / norm:.1e}"]
        print(f"| {' | '.join(cells)} |", flush=True)


def _loss_of_trl(
    folder: Path, state: dict[str, Any], number: int, *, corrected: bool
) -> tuple[float, float, dict[str, Any]]:
    """Return TRL's loss, the sum of the magnitudes of all tokens' losses, and gradients by name, in float64."""
    import datasets
    import torch
    import transformers
    from trl import GRPOConfig, GRPOTrainer

    loss_type, scale, masked, beta = CASES[number]
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder / "start")
    rows = [{"prompt": prompt} for prompt in prompts() for _ in range(NUM_GENERATIONS)]
    number_of = {prompt: number for number, prompt in enumerate(prompts())}

    def rollouts(asked: list[str], trainer: Any) -> dict[str, list[Any]]:
        turns = [count() for _ in number_of]
        own = [completions(number_of[prompt])[next(turns[number_of[prompt]])] for prompt in asked]
        return {
            "prompt_ids": [tokenizer(prompt).input_ids for prompt in asked],
            "completion_ids": own,
            "logprobs": [[0.0] * len(tokens) for tokens in own],
        }

    settings = GRPOConfig(
        str(folder / "of_trl"),
        loss_type=loss_type,
        scale_rewards=scale,
        mask_truncated_completions=masked,
        beta=beta,
        use_bias_correction_kl=corrected,
        temperature=TEMPERATURE,
        reward_weights=list(WEIGHTS),
        num_generations=NUM_GENERATIONS,
        max_completion_length=MAX_LENGTH,
        per_device_train_batch_size=len(rows),
        gradient_accumulation_steps=1,
        gradient_checkpointing=False,
        bf16=False,
        use_cpu=True,
        report_to="none",
    )
    # The reference is the model in this folder; the policy has been trained further.
    policy = transformers.AutoModelForCausalLM.from_pretrained(folder / "start", dtype=torch.float32)
    given = {name.removeprefix("policy."): value for name, value in state.items() if name.startswith("policy.")}
    policy.load_state_dict(given, strict=False)
    policy.tie_weights()
    trainer = GRPOTrainer(
        policy,
        [shorter, even],
        settings,
        train_dataset=datasets.Dataset.from_list(rows),
        processing_class=tokenizer,
        rollout_func=rollouts,
    )
    trainer.current_gradient_accumulation_steps = 1
    trainer.model.train()
    scored = trainer._generate_and_score_completions(rows)
    loss = trainer.compute_loss(trainer.model, scored)
    loss.backward()
    gradients = {name: parameter.grad.double() for name, parameter in trainer.model.named_parameters()}
    return loss.item(), _size(loss_type, scored), gradients


def _size(loss_type: str, scored: dict[str, Any]) -> float:
    """Return the loss with the magnitudes of all advantages: with their signs the sum may be near 0."""
    sizes = scored["advantages"].abs()[:, None] * scored["completion_mask"]
    if loss_type == "grpo":
        return float((sizes.sum(1) / scored["completion_mask"].sum(1).clamp(min=1)).mean())
    divisor = scored["num_items_in_batch"] if loss_type == "dapo" else len(sizes) * MAX_LENGTH
    return float(sizes.sum() / divisor)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("which", choices=["ours", "trl"])
    parser.add_argument("folder", type=Path, help="a new folder for ours, the same for trl")
    arguments = parser.parse_args()
    sys.exit({"ours": ours, "trl": trl}[arguments.which](arguments.folder))
