"""Settings: written files are read back, and every user error is one line that names source, setting and cure."""

import os
import re
from dataclasses import asdict, replace
from pathlib import Path
from typing import get_type_hints

import pytest
import yaml

from odc_mpi.errors import UserError
from odc_mpi.training.recipes.grpo import GRPOConfig
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
GRPO = ("--run.objective=grpo", "--rl.reward_funcs=f")
OUTER, CHANGE = ("--islands.by=2", "--islands.mode=outer"), ("--islands.sync_when=change",)

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


def message(path: Path | None, *overrides: str) -> str:
    """Return the error of a load, without the directory that pytest made."""
    with pytest.raises(UserError) as raised:
        load(path, overrides)
    text = str(raised.value)
    assert "\n" not in text
    return text.replace(f"{path}", "job.yaml")


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
    rl = GRPOConfig([word, "d e.py:f"], [1, 0.5], tokenizer=word, store_bytes=2 << 20)
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
    assert load(None, ["--data.path", "d", "--model.config.model_type", "llama"]).model.config == {
        "model_type": "llama"
    }
    assert load(path, ["--model.config", "{model_type: gpt2}"]).model.config == {"model_type": "gpt2"}


def test_null_takes_a_setting_back(write):
    config = load(write(MINIMAL), ["--model.path", "null", "--model.config.model_type", "qwen2"])
    assert config.model == ModelConfig(config={"model_type": "qwen2"})


@pytest.mark.parametrize(
    ("setting", "text", "value"),
    [
        *(
            ("optim.learning_rate", text, 1e-4)
            for text in ("1e-4", "1E-4", "1.e-4", "1.0e-4", ".1e-3", "+.0001", "0.0001", "+1e-4")
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
    objective = GRPO if setting.startswith("rl.") else ()
    needed = ("--model.path=m", "--data.path=p.jsonl" if objective else "--data.path=d.h5", *objective)
    section, _, name = setting.partition(".")
    for text, value in (("4096", 4096), ("'4096'", 4096), ("0x1F", 31), ("512M", 512 << 20), ("2g", 2 << 30)):
        from_file = load(write(f"{section}: {{{name}: {text}}}\n"), needed)
        for config in (from_file, load(None, [*needed, f"--{setting}", text])):
            found = getattr(getattr(config, section), name)
            assert (found, type(found)) == (value, int)
            assert load(write(dump(config))) == config
    for text in ("64MB", "-1", "1.5", "true", "[1]"):
        assert "a size such as 512M" in message(write(f"{section}: {{{name}: {text}}}\n"), *needed)


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


SIZE = "expected auto or a size such as 512M"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("data: {path: d, balanse: x}", "unknown setting data.balanse: did you mean data.balance?"),
        ("learning_rat: 1", "unknown setting learning_rat: did you mean optim.learning_rate?"),
        ("optimizer: {learning_rate: 1}", "unknown setting optimizer.learning_rate: did you mean optim."),
        ("zzz: {}", "unknown setting zzz: odc-mpi train --help lists all"),
        ("1: {}", "unknown setting 1: "),
        ("data: 3", "data is a section: expected a setting of it"),
        ("run: {steps: true}", "run.steps: expected an integer, got true"),
        ("run: {steps: 3.0}", "run.steps: expected an integer, got 3.0"),
        ("run: {steps: '3'}", 'run.steps: expected an integer, got "3"'),
        *(
            (f"comm: {{gradient_cache_bytes: {got}}}", f"comm.gradient_cache_bytes: {SIZE}, got {got}")
            for got in ("-1", "1.5", "true", '"-512M"', '"512MB"', '"much"', '""', "[1]")
        ),
        *(
            (f"comm: {{mailbox_bytes: {got}}}", "comm.mailbox_bytes: expected a size such as 512M, 1 or more, got 0")
            for got in ("0", "0K")
        ),
        ("run: {steps: -1}", "run.steps: expected an integer, 0 or more, got -1"),
        ("run: {dir: 3}", "run.dir: expected text, got 3 (put it in quotes)"),
        ("run: {dir: ''}", 'run.dir: expected text, not empty, got ""'),
        ("run: {seed: -1}", "run.seed: expected an integer, from 0 to 2**63 - 1, got -1"),
        ("run: {seed: 9223372036854775808}", "run.seed: expected an integer, from 0"),
        ("run: {device: gpu}", 'run.device: expected auto or cpu or cuda, got "gpu"'),
        ("run: {threads: -1}", "run.threads: expected an integer, from 0 to 1024"),
        ("run: {report_to: 1}", "run.report_to: expected a list of names or null, got 1"),
        ("run: {report_to: [wandb, x]}",
         "run.report_to: expected a list of names or null, each one of tensorboard, mlflow, wandb, trackio, "
         'comet_ml, clearml, swanlab, got ["wandb", "x"]'),
        ("run: {max_skipped_steps: 0}", "run.max_skipped_steps: expected an integer, 1 or more"),
        ("model: {gradient_checkpointing: 1}", "model.gradient_checkpointing: expected auto or true or false,"),
        ("model: {config: qwen2}", 'model.config: expected a mapping or null, got "qwen2"'),
        ("model: {path: [m]}", 'model.path: expected text or null, got ["m"]'),
        ("model: {param_dtype: fp16}", 'model.param_dtype: expected auto or float32 or bfloat16, got "fp16"'),
        *(
            (
                f"model: {{attn_implementation: {got}}}",
                f'model.attn_implementation: expected sdpa or eager, got "{got}"{reason}',
            )
            for got, reason in [("flex_attention", " (torch has no backward"), ("fast", "")]
        ),
        ("data: {path: null}", "data.path: expected text, got null"),
        ("data: {minibatch_sequences: 0}", "data.minibatch_sequences: expected an integer, 1 or more"),
        ("data: {max_tokens_per_microbatch: 0}", "data.max_tokens_per_microbatch: expected an integer, from 1"),
        ("comm: {timeout_s: 0.9}", "comm.timeout_s: expected a finite number, 1 or more, got 0.9"),
        ("comm: {transport: window}", "unknown setting comm.transport"),
        ("optim: {optimizer: adam}", 'optim.optimizer: expected adamw or sgd, got "adam"'),
        ("optim: {lr_scheduler_type: 1}", "optim.lr_scheduler_type: expected linear or cosine or constant"),
        ("optim: {learning_rate: .nan}", "optim.learning_rate: expected auto or a finite number, got NaN"),
        ("optim: {learning_rate: 1e999}", "optim.learning_rate: expected auto or a finite number, got Inf"),
        ("optim: {learning_rate: '1e-4'}", 'optim.learning_rate: expected auto or a finite number, got "1'),
        ("optim: {learning_rate: -1}", "optim.learning_rate: expected auto or a finite number, 0 or mor"),
        ("optim: {adam_beta1: 1}", "optim.adam_beta1: expected a finite number, 0 or more and below 1, got 1"),
        ("optim: {adam_beta2: -.1}", "optim.adam_beta2: expected a finite number, 0 or more and below 1"),
        ("optim: {adam_epsilon: 0}", "optim.adam_epsilon: expected a finite number, above 0"),
        ("optim: {momentum: 1.5}", "optim.momentum: expected a finite number, 0 or more and below 1"),
        ("optim: {max_grad_norm: -1}", "optim.max_grad_norm: expected a finite number, 0 or more"),
        ("optim: {warmup_steps: -1}", "optim.warmup_steps: expected an integer, 0 or more"),
        ("- 1\n- 2",
         "expected a mapping of the sections model, data, lora, rl, dpo, kto, reward, comm, islands, optim, run, got "
         "[1, 2]"),
        ("#" * ((1 << 20) + 1), "expected a configuration file of at most 1048576 bytes, got more"),
        ("model: {path: m}", "data.path is missing: expected "),
        ("data: {path: d}", "expected model.path or model.config, got neither"),
        ("data: {path: a b.jsonl.gz}\nmodel: {path: m}",
         "data.path: expected a data set of odc-mpi prepare, got text: run odc-mpi prepare 'a b.jsonl.gz' --out "
         "'a b.h5' --tokenizer m, and set data.path to 'a b.h5'"),
        ("run: {num_train_epochs: 0}", "run.num_train_epochs: expected a finite number or null, above 0"),
        (MINIMAL + "run: {eval_every: 5}", "run.eval_every requires data.eval_path"),
        ("data: {path: d, eval_path: e}\nmodel: {path: m}\n"
         "run: {eval_every: 4, checkpoint_every: 6, keep_best: true}",
         "run.keep_best needs an evaluation of each checkpoint: expected run.checkpoint_every to be a "
         "positive multiple of run.eval_every, got 6 and 4"),
        ("data: {path: d}\nmodel: {config: {hidden_size: 3}}", "model.config: model_type is missing"),
        (MINIMAL + "lora: {r: 0}", "lora.r: expected an integer or null, 1 or more"),
        (MINIMAL + "lora: {target_modules: q_proj}", "lora.target_modules requires lora.r"),
        (MINIMAL + "lora: {alpha: 16}", "lora.alpha requires lora.r"),
    ],
)  # fmt: skip
def test_user_errors_in_a_file(write, text, expected):
    assert message(write(text)).startswith(f"job.yaml: {expected}")


@pytest.mark.parametrize(
    ("text", "line", "reason"),
    [
        ("run:\n  steps: [1", 2, ""),
        ("run:\n\tsteps: 1", 2, ""),
        ("run: {}\n---\nrun: {}", 2, ""),
        ("run: {dir: 2026-02-31}", 0, ""),
        ("run: {dir: \x07}", 0, ""),
        ("run: {dir: !!python/name:os.system x}", 1, ""),
        ('run: {dir: "a\\0"}', 1, "a NUL character or half of a surrogate pair"),
        ('run: {dir: "\\ud800"}', 1, "a NUL character or half of a surrogate pair"),
        ('model: {config: {"a\\0": 1}}', 1, "a NUL character or half"),
        ("run: {steps: 0x1" + "0" * 16 + "}", 1, "an integer of more than 64 bits"),
        ("run: {steps: 0x" + "f" * 9999 + "}", 1, "an integer of more than 64 bits"),
        ("run: {steps: " + "9" * 9999 + "}", 0, "Exceeds the limit"),
        ("run: &a\n  dir: *a", 2, "an alias of a value that contains it"),
        ("&a [*a]", 1, "an alias of a value that contains it"),
        ("model: &a {config: {<<: *a}}", 1, "an alias of a value that contains"),
        ("[" * 100_000, 1, "more than 50 levels of nesting"),
        ("model: {config: " + "{a: " * 10_000, 1, "more than 50 levels"),
        ("\n".join(" " * level + "-" for level in range(1000)), 51, "more than 50"),
        ("[" + "1," * 100_000 + "]", 1, "more than 10000 keys and values, "),
        (_bomb("[{}]"), 5, "more than 10000 keys and values, "),
        (_bomb("{{<<: [{}]}}"), 5, "more than 10000 keys and values, "),
        ("run:\n  steps: 1\n  steps: 2", 3, "steps is given twice"),
        ("run: {steps: 1}\nrun: {dir: a}", 2, "run is given twice"),
    ],
)
def test_files_that_are_not_yaml(write, text, line, reason):
    place = f"job.yaml, line {line}" if line else "job.yaml"
    assert message(write(text)).startswith(f"{place}: expected YAML, got: {reason}")


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--run.stepz", "3", "--per-device-train-batch-size", "2", "--save_step", "2"],
         "command line: unknown setting run.stepz: did you mean run.steps?; per-device-train-batch-size: set data."
         "minibatch_sequences, the sequences per step on all ranks together; unknown setting save_step: did you "
         "mean run.checkpoint_every?"),
        (["--optim.weight_decay", "-1e-3"], "command line: optim.weight_decay: expected a finite number, 0 or more"),
        (["--run.steps"], "command line: --run.steps expected an integer after it, got nothing"),
        (["--run.steps", "--run.dir", "x"], "command line: --run.steps expected an integer after it, got nothing"),
        (["--run.steps="], 'command line: run.steps: expected an integer, got ""'),
        (["--run.steps", "many"], 'command line: run.steps: expected an integer, got "many"'),
        (["--run.steps", "[1"], 'command line: run.steps: expected an integer, got "[1"'),
        (["--comm.parameter_cache_bytes", "-5"], f'command line: comm.parameter_cache_bytes: {SIZE}, got -5'),
        (["run.steps", "3"], 'command line: expected --section.key value, got "run.steps"'),
        (["--run.steps", "3", "--=1"], 'command line: expected --section.key value, got "--=1"'),
        (["--", "3"], 'command line: expected --section.key value, got "--"'),
        (["--model.config.a"], "command line: --model.config.a expected a value after it, got nothing"),
        (["--model.config.a=1", "--model.config.a.b=1"], "command line: --model.config.a.b: expected model.config.a"),
        (["--islands.by", "0"], "command line: islands.by: expected off or node or an integer, 1 or more, got 0"),
        (["--islands.by", "node", "--run.objective", "grpo", "--data.path", "p.jsonl", "--rl.reward_funcs", "f"],
         "islands.by: expected off with run.objective grpo, got node: ranks train on"),
        (["--data.context_parallel=auto"], "data.balance: expected dynamic with data.context_parallel auto, got"),
        (["--data.context_parallel=auto", "--data.balance=dynamic", "--model.compile"],
         "model.compile: expected false with data.context_parallel auto, got true"),
        (["--islands.by=2", "--data.context_parallel=auto"], "data.context_parallel: expected off with isl"),
        (["--islands.mode=outer"], "islands.mode: outer requires islands, got none: set islands.by"),
        ([*OUTER, "--islands.fragments=4"], "islands.fragments: expected a divisor of islands.sync_every, 30, got 4"),
        ([*OUTER, "--islands.fragments=3", "--islands.delay=10"], "islands.delay: expected less than 10"),
        ([*OUTER, "--islands.error_feedback=true"], "islands.error_feedback: expected false with islands.wire float32"),
        ([*OUTER, *CHANGE, "--islands.fragments=3"], "islands.fragments: expected 1 with islands.sync_when change"),
        ([*OUTER, *CHANGE, "--islands.delay=3"], "islands.delay: expected 0 with islands.sync_when change"),
        ([*OUTER, *CHANGE, "--optim.max_grad_norm=0"], "optim.max_grad_norm: expected a value above 0 with"),
        ([*OUTER, "--islands.outer_momentum=1"], "command line: islands.outer_momentum: expected a finite number"),
        (["--rl.reward_funcs=f"], "rl.reward_funcs requires run.objective grpo"),
        (["--run.objective=grpo"], "run.objective grpo requires rl.reward_funcs"),
        ([*GRPO, "--model.path=null", "--model.config.model_type=qwen2"], "run.objective grpo requires a tokenizer"),
        ([*GRPO, "--rl.reward_weights=[1, 2]"], "rl.reward_weights: expected 1, a weight for each of rl."),
        ([*GRPO, "--rl.reward_weights=abc"], "command line: rl.reward_weights: expected a list of numbers"),
        ([*GRPO, "--rl.num_iterations=2"], "rl.num_iterations: expected 1 with run.objective grpo, got 2"),
        ([*GRPO, "--rl.num_generations=5"], "data.minibatch_sequences: expected a multiple of rl.num_generations,"),
        ([*GRPO, "--rl.num_generations=1"], "command line: rl.num_generations: expected an integer, 2 or more"),
        ([*GRPO, "--rl.temperature=0"], "command line: rl.temperature: expected a finite number, above 0"),
        ([*GRPO, "--rl.loss_type=bnpo"], "command line: rl.loss_type: expected dapo or grpo or dr_grpo"),
        ([*GRPO, "--lora.r=4", "--lora.dropout=0.1"], "lora.dropout: expected 0"),
        ([*GRPO, "--data.balance=dynamic"], "data.balance: expected lb_mini with run.objective grpo, got dy"),
        (["--model.config.model_type", "x"], "model.config.model_type: the type is that of model.path: remove one of"),
        *(
            (["--run.objective", "dpo", "--dpo.loss_type", *values], f"dpo.{expected}")
            for values, expected in [
                (["sigmoid,ipoo"], "loss_type: expected some of sigmoid, hinge, "),
                (["sigmoid,sft", "--dpo.loss_weights", "[1]"], "loss_weights: expected 2 weights, one for each loss"),
                (["sigmoid,sft", "--dpo.loss_weights", "[1, -0.5]"], "loss_weights: expected 2 weights"),
                (["sigmoid,sft", "--dpo.loss_weights", "[0, 0]"], "loss_weights: expected 2 weights"),
                (["hinge", "--dpo.label_smoothing", "0.1"], "label_smoothing: expected 0 without the losses sigmoid"),
            ]
        ),
    ],
)  # fmt: skip
def test_user_errors_in_arguments(write, arguments, expected):
    source = "" if expected.startswith("command line: ") else "job.yaml: "
    assert message(write(MINIMAL), *arguments).startswith(source + expected)


def test_missing_settings_without_a_file_are_the_command_lines():
    assert message(None, "--model.path", "m").startswith("command line: data.path is missing")


@pytest.mark.parametrize("text", ["a\0b", "\udcff"])
def test_arguments_that_are_not_utf8(write, text):
    assert message(write(MINIMAL), "--run.dir", text).startswith("command line: run.dir: expected text in UTF-8")


def test_files_that_cannot_be_read(tmp_path):
    assert message(tmp_path / "none.yaml") == "job.yaml: expected a configuration file, got: No such file or directory"
    assert message(tmp_path).startswith("job.yaml: expected a configuration file, got: Is a directory")
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    assert message(tmp_path / "binary").startswith("job.yaml: expected YAML, got: ")


def test_files_that_never_end(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    assert message(tmp_path / "pipe") == "job.yaml: expected a configuration file, got a named pipe"
    assert message(Path("/dev/zero")) == "job.yaml: expected a configuration file, got a device"


def test_anchors_and_merges_are_no_doubled_keys(write):
    text = "data: &d {path: d}\nmodel: {config: &c {<<: *d, path: e, model_type: a}}\n"
    assert load(write(text)).model.config == {"path": "e", "model_type": "a"}


def test_long_values_are_cut_in_errors(write):
    assert len(message(write(f"run: {{steps: {'x' * 5000}}}"))) < 200


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
    with pytest.raises(UserError, match="names, got otpim"):
        help_text("otpim")


def test_every_value_and_where_it_comes_from(write):
    path = write(MINIMAL + "run: {num_train_epochs: 3}\noptim: {weight_decay: 0.1}\n")
    rows = [line.split(None, 1) for line in describe(path, ["--max_steps", "5", "--model.config.hidden_size", "8"])]
    assert len(rows) == sum(len(get_type_hints(section)) for section in get_type_hints(Config).values())
    found = {name: re.split("  +", rest) for name, rest in rows}
    assert found["run.steps"] == ["5", "command line"] and found["run.num_train_epochs"] == ["null", "default"]
    assert found["optim.weight_decay"] == ["0.1", str(path)] and found["optim.learning_rate"] == [
        "2e-05",
        "auto (default)",
    ]
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


def test_a_tilde_is_the_home_directory(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", "/home/me")
    path = tmp_path / "c.yaml"
    path.write_text(
        "model: {path: ~/m}\ndata: {path: ~/d, eval_path: ~/e}\nrun: {objective: grpo, dir: ~/r, log_dir: ~/l}\n"
        "rl: {reward_funcs: ['~/f.py:f', length], tokenizer: ~/t}\n"
    )
    config = load(path, ["--run.resume=~/s"])
    named = (config.model.path, config.data.path, config.data.eval_path, config.run.dir, config.run.log_dir)
    assert named == tuple(f"/home/me/{name}" for name in "mderl")
    assert (config.run.resume, config.rl.tokenizer) == ("/home/me/s", "/home/me/t")
    assert config.rl.reward_funcs == ["/home/me/f.py:f", "length"]
