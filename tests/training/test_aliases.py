"""Names of other libraries: each is accepted where it means the same, or answered with what to set instead."""

import ast
import dataclasses
import importlib.util
from pathlib import Path

import pytest
import transformers
from user_errors import refused

from odc_mpi.training.settings import load

REQUIRED = ("--model.path", "m", "--data.path", "d")
#: Names that mean the same there and here, with a value as it is typed, and the value here.
SAME = {
    "max_steps 7": ("run.steps", 7),
    "max-steps -1": ("run.steps", 0),
    "run.save_steps 5": ("run.checkpoint_every", 5),
    "save_total_limit null": ("run.keep_checkpoints", 0),
    "keep_latest_k 2": ("run.keep_checkpoints", 2),
    "output_dir here": ("run.dir", "here"),
    "resume_from_checkpoint false": ("run.resume", "never"),
    "resume_from_checkpoint there": ("run.resume", "there"),
    "optim.lr 1e-5": ("optim.learning_rate", 1e-5),
    "lr_scheduler_type constant_with_warmup": ("optim.lr_scheduler_type", "constant"),
    "warmup-steps 3": ("optim.warmup_steps", 3),
    "max_grad_norm 2": ("optim.max_grad_norm", 2.0),
    "num_train_epochs 2": ("run.num_train_epochs", 2.0),
    "seed 3": ("run.seed", 3),
    "report_to none": ("run.report_to", []),
    "report_to wandb mlflow": ("run.report_to", ["wandb", "mlflow"]),
    "gradient_checkpointing": ("model.gradient_checkpointing", True),
    "model.compile": ("model.compile", True),
    "bf16": ("model.param_dtype", "bfloat16"),
    "bf16 false": ("model.param_dtype", "float32"),
    "dtype bfloat16": ("model.param_dtype", "bfloat16"),
    "attn_implementation eager": ("model.attn_implementation", "eager"),
    "base_model n": ("model.path", "n"),
    "lora.target-modules q_proj,v_proj": ("lora.target_modules", ["q_proj", "v_proj"]),
    "lora_target_modules q_proj v_proj": ("lora.target_modules", ["q_proj", "v_proj"]),
    "lora_target_modules [q_proj, v_proj]": ("lora.target_modules", ["q_proj", "v_proj"]),
    "layers_to_transform 0,2": ("lora.layers_to_transform", [0, 2]),
    "lora_alpha 3": ("lora.alpha", 3),
    "num_generations 4": ("rl.num_generations", 4),
    "scale_rewards false": ("rl.scale_rewards", "none"),
    "log_completions": ("rl.log_completions", 1),
    "reward_weights 1 0.5": ("rl.reward_weights", [1, 0.5]),
    "beta 0.1 --objective grpo": ("rl.beta", 0.1),
    "beta 0.1 --run.objective dpo": ("dpo.beta", 0.1),
    "center_rewards_coefficient 0.01 --run.objective reward": ("reward.center_rewards_coefficient", 0.01),
    "loss_type hinge,sft --run.objective=dpo": ("dpo.loss_type", ["hinge", "sft"]),
}


def value_of(config, name):
    section, _, field = name.partition(".")
    return getattr(getattr(config, section), field)


@pytest.mark.parametrize("typed", SAME)
def test_names_that_mean_the_same(typed):
    setting, value = SAME[typed]
    needed = ["--lora.r", "2"] if setting.startswith("lora.") else []
    if setting.startswith("rl."):
        rewards = "a,b" if "weights" in typed else "a"
        needed = ["--run.objective", "grpo", "--reward_funcs", rewards]
    config = load(None, [*REQUIRED, *needed, *f"--{typed}".split(" ")])
    assert value_of(config, setting) == value


def test_a_file_in_the_style_of_another_library(tmp_path):
    path = tmp_path / "job.yaml"
    path.write_text("base_model: m\ndata: {path: d}\nlora_r: 8\nlora-target-modules: q_proj, v_proj\nbf16: true\n")
    config = load(path, ["--lora_r", "4"])
    assert (config.lora.r, config.lora.target_modules) == (4, ["q_proj", "v_proj"])
    assert (config.model.path, config.model.param_dtype) == ("m", "bfloat16")


@pytest.mark.parametrize(
    "order", [("--num_train_epochs=2", "--max_steps=3"), ("--max_steps=3", "--num_train_epochs=2")]
)
def test_the_later_of_steps_and_epochs_wins(order):
    config = load(None, [*REQUIRED, *order]).run
    assert (config.num_train_epochs, config.steps == 3) == ((None, True) if "steps" in order[1] else (2.0, False))


@pytest.mark.parametrize(
    ("typed", "expected"),
    [
        ("save_strategy epoch", "save_strategy: set run.checkpoint_every"),
        ("optim adamw_torch", "optim: optim is a section here: set optim.optimizer"),
        ("run.gradient_accumulation_steps 4", "set data.minibatch_sequences"),
        ("fsdp_config.x 1", "always sharded"),
        ("training.steps 4", "did you mean run.steps?"),
        ("label_smoothing_factor 0.1", "label_smoothing_factor: not supported"),
        ("neftune_noise_alpha 5", "neftune_noise_alpha: not supported"),
        ("rundir x", "did you mean run.dir?"),
        # torchtitan
        ("training.num_tokens_per_train_step 4096", "set data.minibatch_sequences"),
        ("training.max_context_length 4096", "prepare --max-length"),
        ("checkpoint.folder here", "set run.checkpoint_every, run.keep_checkpoints"),
        ("lr_scheduler.total_steps 9", "set run.steps"),
        ("parallelism.context_parallel_degree 2", "set data.context_parallel"),
        ("parallelism.data_parallel_replicate_degree 2", "set islands.by"),
        ("fault_tolerance.semi_sync_method diloco", "set islands.mode to outer"),
        ("should_quantize true", "set islands.wire"),
        # axolotl
        ("rl grpo", "set run.objective"),
        ("eval_sample_packing false", "always packed"),
        ("model_config.output_router_logits true", "set model.config"),
        ("model_type AutoModelForCausalLM", "config.json in model.path"),
        ("liger_fused_linear_cross_entropy true", "set model.compile"),
        ("optim.warmup 4", "unknown setting optim.warmup: odc-mpi train --help"),
        ("save_stuff_often 4", "unknown setting save_stuff_often: odc-mpi"),
        ("beta 0.1", "beta is a setting of several sections: write rl.beta or dpo.beta"),
        ("device cpu", "write optim.device or run.device"),
        ("run.lr 4", "did you mean optim.learning_rate?"),
        ("run.steps 4 5", 'expected --section.key value, got "5"'),
    ],
)
def test_answers(typed, expected):
    refused(expected, load, None, [*REQUIRED, *f"--{typed}".split(" ")])


def trl_names():
    spec = importlib.util.find_spec("trl")
    if spec is None:
        pytest.skip("trl is not installed")
    folder = Path(spec.submodule_search_locations[0]) / "trainer"
    for kind in ("base", "sft", "grpo", "dpo", "reward", "model"):
        for node in ast.walk(ast.parse((folder / f"{kind}_config.py").read_text())):
            if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                yield node.target.id


def peft_names():
    peft = pytest.importorskip("peft")
    return [field.name for field in dataclasses.fields(peft.LoraConfig)]


@pytest.mark.parametrize(
    "names",
    [trl_names, peft_names, lambda: [field.name for field in dataclasses.fields(transformers.TrainingArguments)]],
    ids=["trl", "peft", "transformers"],
)
def test_every_name_of_the_library_is_accepted_or_answered(names):
    found = [name for name in names() if not name.startswith("_")]
    assert len(found) > 30
    for name in found:  # the value is none of any setting
        assert "unknown setting" not in refused("", load, None, [*REQUIRED, f"--{name}", "\udcff"])
