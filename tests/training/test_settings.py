"""Settings: written files are read back, and every user error is one line that names source, setting and cure."""

import os
import re
from dataclasses import asdict, replace
from pathlib import Path
from typing import get_type_hints

import pytest
import yaml
from user_errors import refused

from odc_mpi.training.recipes.rollouts.settings import RLConfig
from odc_mpi.training.settings import (
    CommConfig,
    Config,
    DataConfig,
    LoraConfig,
    ModelConfig,
    OptimConfig,
    RunConfig,
    all_settings,
    describe,
    dump,
    help_text,
    load,
)
from odc_mpi.training.start.resolved_settings import with_device

MINIMAL = "model: {path: weights}\ndata: {path: data.h5}\n"
JOBS = Path(__file__).parents[2] / "jobs"
GRPO = "--run.objective=grpo --rl.reward_funcs=f"
DISTILL = "--run.objective=distill --rl.teacher_path=t"
OLD = f"{GRPO} --rl.max_staleness=2"
DPO = "--run.objective dpo --dpo.loss_type"
OUTER, CHANGE, EXACT = "--islands.by=2 --islands.mode=outer", "--islands.sync_when=change", "--run.exact=true"

# Texts that YAML 1.1 would read as something else, were they written without quotes.
AWKWARD = [
    *("1e3", "-.5E-3", "1.", "null", "~", "on", "No", "true", "2026-01-31", "0x1f", "1_0", "1:30", ".inf", "<<", "="),
    *("a: b", "- a", "# a", " a ", "ü€", "a\nb", "a\\b", "'", '"', "{", "[x", "*a", "&a", "!t", "%", "@"),
    *("x" * 300, "many words " * 30),
]


@pytest.fixture
def write(tmp_path):
    def write_yaml(text: str) -> Path:
        path = tmp_path / "job.yaml"
        path.write_text(text, encoding="utf-8")
        return path

    return write_yaml


def check_error(path, words, *overrides):
    """Check that a load is refused, with these words after the name of the source."""
    place, _, words = words.rpartition("| ")
    line = refused(words, load, path, overrides).replace(f"{path}", "job.yaml")
    assert line.startswith((place or "job.yaml: ") + words.partition("...")[0]), line


@pytest.mark.parametrize("word", AWKWARD)
def test_what_dump_writes_load_reads(write, word):
    tree = {word: [word, 3, 1e-7, True, None, {word: {}, "on": "off"}], "model_type": word}
    config = Config(
        model=ModelConfig(config=tree, gradient_checkpointing=False),
        data=DataConfig(path=word, eval_path=word),
        lora=LoraConfig(r=2, target_modules=[word, "x"]),
        comm=CommConfig(parameter_cache_bytes=1, timeout_s=1e300 / len(word)),
        optim=OptimConfig(adam_epsilon=1e-40 / len(word), warmup_ratio=0.1),
        run=RunConfig(dir=word, report_to=["mlflow", "tensorboard"]),
    )
    rl = RLConfig([word, "d e.py:f"], [1, 0.5], tokenizer=word, store_bytes=2 << 20)
    rewarded = replace(config, rl=rl, run=RunConfig(objective="grpo"))
    for each in (config, rewarded):
        assert load(write(dump(each))) == each


def test_dump_is_plain_yaml_with_every_setting(write):
    config = load(write(MINIMAL))
    assert yaml.safe_load(dump(config)) == asdict(config)
    assert dump(config).startswith("model:\n  path: weights\n")  # the order of the help, not of the alphabet


@pytest.mark.parametrize("text", [MINIMAL, "", "# nothing\n", "optim:\nrun: {}\n"])
def test_absent_settings_keep_their_defaults(write, text):
    config = load(write(text), ["--model.path", "m", "--data.path", "d"])
    assert config == Config(model=ModelConfig(path="m"), data=DataConfig(path="d"))
    assert (config.optim.learning_rate, config.data.minibatch_sequences, config.comm.timeout_s) == ("auto", 16, 600.0)


def test_overrides_win_and_the_last_wins_most(write):
    path = write(MINIMAL + "run: {steps: 3, dir: here}\n")
    config = load(path, ["--run.steps", "4", "--run.steps=5", "--model.gradient_checkpointing", "true"])
    assert config.run == RunConfig(steps=5, dir="here")
    assert config.model.gradient_checkpointing is True


def test_one_key_of_a_mapping_is_overridden(write):
    path = write("model: {config: {model_type: qwen2, hidden_size: 64, rope: {theta: 1, kind: a}}}\ndata: {path: d}\n")
    extra = ["--model.config.hidden_size", "128", "--model.config.rope.theta=1e-4", "--model.config.new", "null"]
    expected = {"model_type": "qwen2", "hidden_size": 128, "rope": {"theta": 1e-4, "kind": "a"}, "new": None}
    assert load(path, extra).model.config == expected
    llama = load(None, ["--data.path", "d", "--model.config.model_type", "llama"])
    assert llama.model.config == {"model_type": "llama"}
    assert load(path, ["--model.config", "{model_type: gpt2}"]).model.config == {"model_type": "gpt2"}


def test_null_takes_a_setting_back(write):
    config = load(write(MINIMAL), ["--model.path", "null", "--model.config.model_type", "qwen2"])
    assert config.model == ModelConfig(config={"model_type": "qwen2"})


@pytest.mark.parametrize(
    ("setting", "text", "value"),
    [
        *(
            ("optim.learning_rate", text, 1e-4)
            for text in ["1e-4", "1E-4", "1.e-4", "1.0e-4", ".1e-3", "+.0001", "0.0001", "+1e-4"]
        ),
        ("comm.timeout_s", "5", 5.0),
        ("comm.parameter_cache_bytes", "auto", "auto"),
        ("comm.parameter_cache_bytes", "0", 0),
        ("run.report_to", "wandb", ["wandb"]),
        ("run.report_to", "[mlflow, trackio]", ["mlflow", "trackio"]),
        ("run.report_to", "null", None),
    ],
)
def test_values_however_written(write, setting, text, value):
    section, _, name = setting.partition(".")
    from_file = load(write(f"{MINIMAL}{section}: {{{name}: {text}}}\n"))
    for config in (from_file, load(None, ["--model.path", "m", "--data.path=a=b.h5", f"--{setting}", text])):
        found = getattr(getattr(config, section), name)
        assert (found, type(found)) == (value, type(value))
        assert load(write(dump(config))) == config


SIZES = [name for name in all_settings() if name.endswith("_bytes")]


@pytest.mark.parametrize("setting", SIZES)
def test_every_size_takes_the_same_forms(write, setting):
    objective = GRPO.split() if setting.startswith("rl.") else ()
    needed = ("--model.path=m", "--data.path=p.jsonl" if objective else "--data.path=d.h5", *objective)
    section, _, name = setting.partition(".")
    for text, value in (("'4096'", 4096), ("0x1F", 31), ("512M", 512 << 20), ("2g", 2 << 30)):
        from_file = load(write(f"{section}: {{{name}: {text}}}\n"), needed)
        for config in (from_file, load(None, [*needed, f"--{setting}", text])):
            found = getattr(getattr(config, section), name)
            assert (found, type(found)) == (value, int)
            assert load(write(dump(config))) == config
    for text in ("64MB", "-1", "1.5", "true", "[1]"):
        refused(f"{setting}...a size such as 512M", load, write(f"{section}: {{{name}: {text}}}\n"), needed)


def test_zero_is_allowed_where_it_has_a_meaning(write):
    zeros = ["optim.learning_rate", "optim.weight_decay", "optim.adam_beta1", "optim.momentum", "optim.max_grad_norm"]
    zeros += ["optim.warmup_steps", "run.seed", "run.threads"]
    config = asdict(load(write(MINIMAL), [f"--{key}=0" for key in zeros]))
    assert [config[section][name] for section, name in (key.split(".") for key in zeros)] == [0] * len(zeros)


def test_arguments_for_text_are_taken_as_they_are(write):
    for text in ("3", "1e3", "on", "a: b"):
        assert load(write(MINIMAL), ["--run.dir", text]).run.dir == text


def _bomb(form: str) -> str:
    """Return a document in which ten anchors multiply a value by ten each, in a list or by merging mappings."""
    lines = [f"b{i}: &b{i} {form.format(', '.join([f'*b{i - 1}'] * 10))}" for i in range(1, 11)]
    return "\n".join(["b0: &b0 {a: 1}", *lines])


#: Values in YAML that a setting refuses, each named in the error, and what is expected.
BAD_VALUES = {
    "run.steps": ('true; 3.0; "3"; -1', "an integer"),
    "run.dir": ('3; ""', "text"),
    "run.seed": ("-1; 9223372036854775808", "an integer, from 0 to"),
    "run.device": ('"gpu"', "auto or cpu or cuda"),
    "run.threads": ("-1", "an integer, from 0 to 1024"),
    "run.report_to": ('1; ["wandb", "x"]', "a list of names or null"),
    "run.max_skipped_steps": ("0", "an integer, 1 or more"),
    "run.num_train_epochs": ("0", "a finite number or null, above 0"),
    "model.gradient_checkpointing": ("1", "auto or true or false"),
    "model.config": ('"qwen2"', "a mapping or null"),
    "model.path": ('["m"]', "text or null"),
    "model.param_dtype": ('"fp16"', "auto or float32 or bfloat16"),
    "model.attn_implementation": ('"flex_attention"; "fast"', "sdpa or eager"),
    "data.path": ("null", "text"),
    "data.minibatch_sequences": ("0", "an integer, 1 or more"),
    "data.max_tokens_per_microbatch": ("0", "an integer, from 1"),
    "comm.gradient_cache_bytes": ('-1; 1.5; true; "-512M"; "512MB"; "much"; ""; [1]', "auto or a size such as 512M"),
    "comm.mailbox_bytes": ("0", "a size such as 512M, 1 or more"),
    "comm.timeout_s": ("0.9", "a finite number, 1 or more"),
    "optim.optimizer": ('"adam"', "adamw or sgd"),
    "optim.lr_scheduler_type": ("1", "linear or cosine or constant"),
    "optim.learning_rate": ('NaN; Infinity; "1e-4"; -1', "auto or a finite number"),
    "optim.adam_beta1": ("1", "a finite number, 0 or more and below 1"),
    "optim.adam_beta2": ("-0.1", "a finite number, 0 or more and below 1"),
    "optim.adam_epsilon": ("0", "a finite number, above 0"),
    "optim.momentum": ("1.5", "a finite number, 0 or more and below 1"),
    "optim.max_grad_norm": ("-1", "a finite number, 0 or more"),
    "optim.warmup_steps": ("-1", "an integer, 0 or more"),
    "islands.by": ("0", "off or node or an integer, 1 or more"),
    "islands.outer_momentum": ("1", "a finite number"),
    "lora.r": ("0", "an integer or null, 1 or more"),
    "rl.reward_weights": ('"abc"', "a list of numbers"),
    "rl.num_generations": ("0", "an integer, 1 or more"),
    "rl.teacher_path": ('""', "text or null, not empty"),
    "rl.reward_workers": ("-1; 257", "an integer, from 0 to 256"),
    "rl.chat_template_kwargs": ('{"messages": 1}; {"a-b": 1}; 3', "a mapping or null"),
    "rl.importance_sampling_clip_max": ("0.9", "a finite number, 1 or more"),
    "rl.epsilon": ("0; 1", "a finite number, above 0 and below 1"),
    "rl.temperature": ("0", "a finite number, above 0"),
    "rl.loss_type": ('"bnpo"', "dapo or grpo or dr_grpo"),
}


@pytest.mark.parametrize("setting", BAD_VALUES)
def test_bad_values(write, setting):
    """Numbers that JSON does not have are written and named otherwise."""
    (section, _, name), (values, expected) = setting.partition("."), BAD_VALUES[setting]
    for value in values.split("; "):
        text = {"NaN": ".nan", "Infinity": "1e999"}.get(value, value)
        words = f"{setting}: expected {expected}...got {value.removesuffix('inity')}"
        check_error(write(f"{section}: {{{name}: {text}}}"), words)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("data: {path: d, balanse: x}", "unknown setting data.balanse: did you mean data.balance?"),
        ("learning_rat: 1", "unknown setting learning_rat: did you mean optim.learning_rate?"),
        ("optimizer: {learning_rate: 1}", "unknown setting optimizer.learning_rate: did you mean optim."),
        ("zzz: {}", "unknown setting zzz: odc-mpi train --help"),
        ("1: {}", "unknown setting 1: "),
        ("comm: {mailbox_bytes: 0K}", "comm.mailbox_bytes: expected a size such as 512M, 1 or more, got 0"),
        ("model: {attn_implementation: flex_attention}", 'model.attn_implementation...got "flex_attention" (torch'),
        ("run: {dir: 3}", "run.dir: expected text, got 3 (put it in quotes)"),
        ("comm: {transport: window}", "unknown setting comm.transport"),
        ("data: 3", "data is a section"),
        ("- 1\n- 2", "expected a mapping...model, data, lora, rl, dpo, kto, reward, comm, islands, optim, run, got [1"),
        ("#" * ((1 << 20) + 1), "expected a configuration file of at most 1048576 bytes, got more"),
        ("model: {path: m}", "data.path is missing"),
        ("data: {path: d}", "expected model.path or model.config, got neither"),
        ("data: {path: a b.jsonl.gz}\nmodel: {path: m}",
         "data.path: expected...got text: run odc-mpi prepare 'a b.jsonl.gz' --out 'a b.h5' --tokenizer m...'a b.h5'"),
        (MINIMAL + "run: {eval_every: 5}", "run.eval_every requires data.eval_path"),
        ("data: {path: d, eval_path: e}\nmodel: {path: m}\n"
         "run: {eval_every: 4, checkpoint_every: 6, keep_best: true}",
         "run.keep_best...run.checkpoint_every...run.eval_every, got 6 and 4"),
        (MINIMAL + "run: {memory_every: 4, checkpoint_every: 4}",
         "run.memory_every: expected less than run.checkpoint_every, 4, got 4"),
        (MINIMAL + "run: {memory_every: 4}\nislands: {by: node, mode: outer}",
         "islands.mode: expected hybrid with run.memory_every 4, got outer: islands that train apart"),
        ("data: {path: d}\nmodel: {config: {hidden_size: 3}}", "model.config: model_type is missing"),
        (MINIMAL + "lora: {target_modules: q_proj}", "lora.target_modules requires lora.r"),
        (MINIMAL + "lora: {alpha: 16}", "lora.alpha requires lora.r"),
        # Not YAML, or more than a configuration needs.
        ("run:\n  steps: [1", "job.yaml, line 2: | expected YAML, got: "),
        ("run:\n\tsteps: 1", "job.yaml, line 2: | expected YAML, got: "),
        ("run: {}\n---\nrun: {}", "job.yaml, line 2: | expected YAML, got: "),
        ("run: {dir: 2026-02-31}", "expected YAML, got: "),
        ("run: {dir: \x07}", "expected YAML, got: "),
        ("run: {dir: !!python/name:os.system x}", "job.yaml, line 1: | expected YAML, got: "),
        *((text, "job.yaml, line 1: | expected YAML, got: a NUL character or half of a surrogate pair")
          for text in ('run: {dir: "a\\0"}', 'run: {dir: "\\ud800"}', 'model: {config: {"a\\0": 1}}')),
        *((f"run: {{steps: 0x{digits}}}", "job.yaml, line 1: | expected YAML, got: an integer of more than 64 bits")
          for digits in ("1" + "0" * 16, "f" * 9999)),
        ("run: {steps: " + "9" * 9999 + "}", "expected YAML, got: Exceeds the limit"),
        ("run: &a\n  dir: *a", "job.yaml, line 2: | expected YAML, got: an alias of a value that contains it"),
        *((text, "job.yaml, line 1: | expected YAML, got: an alias of a value that contains it")
          for text in ("&a [*a]", "model: &a {config: {<<: *a}}")),
        *((text, "job.yaml, line 1: | expected YAML, got: more than 50 levels of nesting")
          for text in ("[" * 100_000, "model: {config: " + "{a: " * 10_000)),
        ("\n".join(" " * level + "-" for level in range(1000)), "job.yaml, line 51: | expected YAML, got: more"),
        ("[" + "1," * 100_000 + "]", "job.yaml, line 1: | expected YAML, got: more than 10000 keys and values"),
        *((_bomb(form), "job.yaml, line 5: | expected YAML, got: more than 10000 keys and values")
          for form in ("[{}]", "{{<<: [{}]}}")),
        ("run:\n  steps: 1\n  steps: 2", "job.yaml, line 3: | expected YAML, got: steps is given twice"),
        ("run: {steps: 1}\nrun: {dir: a}", "job.yaml, line 2: | expected YAML, got: run is given twice"),
    ],
)  # fmt: skip
def test_user_errors_in_a_file(write, text, expected):
    check_error(write(text), expected)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ("--run.stepz 3 --per-device-train-batch-size 2 --save_step 2",
         "command line: | unknown setting run.stepz: did you mean run.steps?; per-device-train-batch-size: set data."
         "minibatch_sequences...; unknown setting save_step: did you mean run.checkpoint_every?"),
        ("--run.steps", "command line: | --run.steps expected an integer after it, got nothing"),
        ("--run.steps --run.dir x", "command line: | --run.steps expected an integer after it, got nothing"),
        ("--run.steps=", 'command line: | run.steps: expected an integer, got ""'),
        ("--run.steps many", 'command line: | run.steps: expected an integer, got "many"'),
        ("--run.steps [1", 'command line: | run.steps: expected an integer, got "[1"'),
        ("--comm.parameter_cache_bytes -5", "command line: | comm.parameter_cache_bytes: expected auto or a...got -5"),
        ("--optim.weight_decay -1e-3", "command line: | optim.weight_decay: expected a finite number, 0 or more"),
        ("run.steps 3", 'command line: | expected --section.key value, got "run.steps"'),
        ("--run.steps 3 --=1", 'command line: | expected --section.key value, got "--=1"'),
        ("-- 3", 'command line: | expected --section.key value, got "--"'),
        ("--run.dir \udcff", "command line: | run.dir: expected text in UTF-8"),
        ("--run.dir a\0b", "command line: | run.dir: expected text in UTF-8"),
        ("--model.config.a", "command line: | --model.config.a expected a value after it, got nothing"),
        ("--model.config.a=1 --model.config.a.b=1", "command line: | --model.config.a.b: expected model.config.a"),
        ("--model.config.model_type x", "model.config.model_type: the type is that of model.path"),
        ("--data.context_parallel=auto", "data.balance: expected dynamic with data.context_parallel auto, got"),
        ("--data.context_parallel=auto --data.balance=dynamic --model.compile",
         "model.compile: expected false with data.context_parallel auto, got true"),
        *((f"--lora.r=4 --model.cache_frozen_prefix {setting}", f"{name}: expected {wanted} with model.cache_")
          for setting, name, wanted in (("--model.compile", "model.compile", "false"),
                                        ("--islands.by=2", "islands.by", "off"),
                                        ("--data.context_parallel=auto --data.balance=dynamic", "data.context_parallel",
                                         "off"))),
        ("--model.cache_frozen_prefix", "model.cache_frozen_prefix requires lora.r, because these layers are frozen"),
        (f"--islands.by node {GRPO} --data.path p.jsonl", "islands.by: expected off with run.objective grpo, got node"),
        ("--islands.by=2 --data.context_parallel=auto", "data.context_parallel: expected off with isl"),
        ("--islands.mode=outer", "islands.mode: outer requires islands, got none: set islands.by"),
        (f"{OUTER} --islands.fragments=4", "islands.fragments: expected a divisor of islands.sync_every, 30, got 4"),
        (f"{OUTER} --islands.fragments=3 --islands.delay=10", "islands.delay: expected less than 10"),
        (f"{OUTER} --islands.error_feedback=true", "islands.error_feedback: expected false with islands.wire float32"),
        (f"{OUTER} --islands.wire=topk", "islands.error_feedback: expected true with islands.wire topk"),
        (f"{OUTER} --islands.wire=topk --islands.error_feedback=true --run.exact=true", "islands.wire: expected float"),
        (f"{OUTER} {CHANGE} --islands.fragments=3", "islands.fragments: expected 1 with islands.sync_when change"),
        (f"{OUTER} {CHANGE} --islands.quorum=2", "islands.quorum: expected 0 with islands.sync_when change"),
        (f"{OUTER} --islands.quorum=2 --run.exact=true", "islands.quorum: expected 0 with run.exact true, got 2"),
        (f"{OUTER} {CHANGE} --islands.delay=3", "islands.delay: expected 0 with islands.sync_when change"),
        (f"{OUTER} {CHANGE} --optim.max_grad_norm=0", "optim.max_grad_norm: expected a value above 0 with"),
        ("--rl.reward_funcs=f", "rl.reward_funcs requires run.objective grpo or distill: set that, or remove rl.rew"),
        ("--run.objective=dpo --rl.temperature=2", "rl.temperature requires run.objective grpo or distill"),
        ("--run.objective=distill --dpo.beta=2", "dpo.beta requires run.objective dpo"),
        ("--run.objective=distill", "run.objective distill requires rl.teacher_path: set it to the model to learn"),
        (f"{DISTILL} --rl.beta=0.1", "rl.beta: expected 0 with run.objective distill, got 0.1: the teacher takes"),
        (f"{DISTILL} --rl.scale_rewards=none", "rl.scale_rewards: expected group with run.objective distill, got none"),
        (f"{DISTILL} --rl.reward_weights=[1]", "rl.reward_weights: expected 0, a weight for each of rl.reward_funcs"),
        (f"{DISTILL} --rl.reward_funcs=f --rl.num_generations=3", "data.minibatch_sequences: expected a multiple of"),
        (f"{GRPO} --rl.teacher_path=t", "rl.teacher_path: expected null with run.objective grpo, got t: only"),
        (f"{GRPO} --rl.beta=0.1 --rl.scale_rewards=batch", "rl.scale_rewards: expected group or none with rl.beta 0.1"),
        (f"{DISTILL} --data.eval_path=e --run.eval_every=1 --run.checkpoint_every=1 --run.keep_best=true",
         "run.keep_best requires rl.reward_funcs"),
        (f"{GRPO} --rl.num_generations=1", "rl.num_generations: expected 2 or more with run.objective grpo, which"),
        ("--run.objective=grpo", "run.objective grpo requires rl.reward_funcs"),
        (f"{GRPO} --model.path=null --model.config.model_type=qwen2", "run.objective grpo requires a tokenizer"),
        (f"{GRPO} --rl.reward_weights=[1,2]", "rl.reward_weights: expected 1, a weight for each of rl."),
        (f"{GRPO} --rl.num_iterations=2", "rl.num_iterations: expected 1 with run.objective grpo, got 2"),
        (f"{GRPO} --rl.num_generations=5", "data.minibatch_sequences: expected a multiple of rl.num_generations,"),
        (f"{GRPO} --rl.epsilon=0.1", "rl.epsilon: expected 0.2 with rl.max_staleness 0, got 0.1"),
        (f"{GRPO} --importance_sampling_mode=none", "rl.importance_sampling_mode: expected clip with rl.max_staleness"),
        (f"{OLD} --rl.importance_sampling_mode=token_mask --rl.epsilon_high=0.3",
         "rl.epsilon_high: expected null with rl.importance_sampling_mode token_mask, got 0.3"),
        (f"{OLD} --rl.importance_sampling_mode=none --rl.importance_sampling_clip_max=2",
         "rl.importance_sampling_clip_max: expected 3.0 with rl.importance_sampling_mode none, got 2.0"),
        (f"{GRPO} --lora.r=4 --lora.dropout=0.1", "lora.dropout: expected 0"),
        (f"{GRPO} --data.balance=dynamic", "data.balance: expected lb_mini with run.objective grpo, got dy"),
        (f"{DPO} sigmoid,ipoo", "dpo.loss_type: expected some of sigmoid, hinge, "),
        *((f"{DPO} sigmoid,sft --dpo.loss_weights {weights}", "dpo.loss_weights: expected 2 weights")
          for weights in ("[1]", "[1,-0.5]", "[0,0]")),
        (f"{DPO} hinge --dpo.label_smoothing 0.1", "dpo.label_smoothing: expected 0 without the losses sigmoid"),
        # Of exact runs.
        (f"{EXACT} --data.balance=lb_micro", "data.balance: expected...with run.exact true, got lb_micro"),
        (f"{EXACT} --data.context_parallel=auto", "data.context_parallel: expected off with run.exact true, got auto"),
        (f"{EXACT} --model.compile=true", "model.compile: expected false with run.exact true, got true"),
        (f"{EXACT} {GRPO} --rl.skip_failed_rewards=true", "rl.skip_failed_rewards: expected false with run.exact true"),
        (f"{EXACT} {GRPO} --rl.max_staleness=1", "rl.max_staleness: expected 0 with run.exact true"),
        (f"{EXACT} {GRPO} --run.device=cuda", "run.device: expected auto or cpu with run.exact true, got cuda"),
    ],
)  # fmt: skip
def test_user_errors_in_arguments(write, arguments, expected):
    check_error(write(MINIMAL), expected, *arguments.split(" "))


def test_files_that_cannot_be_read(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    for path, got in (
        ("none.yaml", "No such file"),
        (".", "Is a directory"),
        ("pipe", "a named pipe"),
        ("/dev/zero", "a d"),
    ):
        check_error(tmp_path / path, f"expected a configuration file, got...{got}")
    check_error(tmp_path / "binary", "expected YAML, got: ")
    check_error(None, "command line: | data.path is missing", "--model.path", "m")


def test_anchors_and_merges_are_no_doubled_keys(write):
    text = "data: &d {path: d}\nmodel: {config: &c {<<: *d, path: e, model_type: a}}\n"
    assert load(write(text)).model.config == {"path": "e", "model_type": "a"}


def test_long_values_are_cut_in_errors(write):
    assert len(refused("run.steps", load, write(f"run: {{steps: {'x' * 5000}}}"))) < 200


def test_help_names_every_setting_with_default_and_meaning():
    lines = help_text().splitlines()
    settings = [f"{section}.{name}" for section, cls in get_type_hints(Config).items() for name in get_type_hints(cls)]
    assert [line.split()[0] for line in lines if re.match(r"  \w+\.\w", line)] == settings
    assert all(line.isprintable() and len(line) <= 100 for line in lines)
    start = next(i for i, line in enumerate(lines) if line.startswith("  optim.weight_decay"))
    assert lines[start].endswith(" weight decay") and "(float; default: 0.0)" in lines[start + 1]
    optim = help_text("optim").splitlines()
    assert optim[0].startswith("optim: ") and all("data." not in line for line in optim)
    assert "  save_steps " in help_text("names")
    refused("names, got otpim", help_text, "otpim")


def test_every_value_and_where_it_comes_from(write):
    path = write(MINIMAL + "run: {num_train_epochs: 3}\noptim: {weight_decay: 0.1}\n")
    rows = [line.split(None, 1) for line in describe(path, ["--max_steps", "5", "--model.config.hidden_size", "8"])]
    assert len(rows) == sum(len(get_type_hints(section)) for section in get_type_hints(Config).values())
    found = {name: re.split("  +", rest) for name, rest in rows}
    assert found["run.steps"] == ["5", "command line"] and found["run.num_train_epochs"] == ["null", "default"]
    assert found["optim.weight_decay"] == ["0.1", str(path)]
    assert found["optim.learning_rate"] == ["2e-05", "auto (default)"]
    assert found["model.config"] == ['{"hidden_size": 8}', "command line"]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ([], 2e-5),
        (["--lora_r=8"], 1e-4),
        (["--run.objective=grpo", "--reward_funcs=a"], 1e-6),
        (["--run.objective=grpo", "--reward_funcs=a", "--lora_r=8"], 1e-5),
        (["--run.objective=reward"], 1e-4),
        (["--run.objective=reward", "--lora_r=8"], 1e-3),
        (["--model.path=null", "--model.config.model_type=qwen2"], 1e-4),
        (["--learning_rate=3"], 3),
    ],
)
def test_the_learning_rate_depends_on_the_objective(write, arguments, expected):
    assert with_device(load(write(MINIMAL), arguments), "cpu").optim.learning_rate == expected


@pytest.mark.parametrize(("device", "expected"), [("cpu", False), ("cuda", True)])
def test_gradient_checkpointing_on_gpus(write, device, expected):
    assert with_device(load(write(MINIMAL)), device).model.gradient_checkpointing is expected
    assert with_device(load(write(MINIMAL), ["--lora_r", "8"]), device).model.gradient_checkpointing is False


def test_a_tilde_is_the_home_directory(write, monkeypatch):
    monkeypatch.setenv("HOME", "/home/me")
    text = "model: {path: ~/m}\ndata: {path: ~/d, eval_path: ~/e}\nrun: {objective: grpo, dir: ~/r, log_dir: ~/l}\n"
    text += "rl: {reward_funcs: ['~/f.py:f', length], tokenizer: ~/t}\n"
    config = load(write(text), ["--run.resume=~/s"])
    named = (config.model.path, config.data.path, config.data.eval_path, config.run.dir, config.run.log_dir)
    assert named == tuple(f"/home/me/{name}" for name in "mderl")
    assert (config.run.resume, config.rl.tokenizer) == ("/home/me/s", "/home/me/t")
    assert config.rl.reward_funcs == ["/home/me/f.py:f", "length"]
