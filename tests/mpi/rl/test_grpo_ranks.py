"""Learning from rewards: the same completions, losses and gradients on any number of ranks, each group trained once."""

import json
import shutil
import time
from datetime import datetime
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch_reference
import transformers
from exact_runs import ExactRuns
from grpo_job import (
    END,
    MAX_LENGTH,
    NUM_GENERATIONS,
    distillation,
    make_settings,
    only_reward,
    read_prompt_tokens,
    write_teacher,
)
from number_words import number_words
from packed_models import greedy_completion
from small_training import QWEN2, train_to_the_end

from odc_mpi.checkpoint.commands import open_newest_checkpoint
from odc_mpi.checkpoint.manifest import steps_in
from odc_mpi.checkpoint.reader import Checkpoint
from odc_mpi.errors import AllRanksUserError
from odc_mpi.models import families
from odc_mpi.models.decoding import Prompt
from odc_mpi.models.export import export
from odc_mpi.rollout.decode import sample
from odc_mpi.rollout.sampling import RolloutSamplingParams
from odc_mpi.training import run as training_run
from odc_mpi.training.recipes.rollouts.source import RolloutSource
from odc_mpi.training.train import train

pytestmark = [pytest.mark.mpi, pytest.mark.sizes(2, 3)]


@pytest.fixture
def run(world, grpo_dir, base):
    """`run(name, **settings)` trains; returns the lines of metrics and the summary."""

    def start(name="run", **changes):
        return train_to_the_end(make_settings(grpo_dir, **({"run__dir": base / name} | changes)), world)

    start.base, start.path = base, grpo_dir
    return start


@pytest.mark.sizes(2)
def test_completions_and_rewards_are_those_of_a_plain_model(run, grpo_dir):
    rewards = only_reward(grpo_dir, "ends_early")
    lines, _ = run(rl__temperature=0.9, run__steps=1, **rewards)
    config = make_settings(grpo_dir, rl__temperature=0.9)
    order = np.random.default_rng([config.run.seed, 0]).permutation(14)[:6].tolist()
    sampling = RolloutSamplingParams(NUM_GENERATIONS, MAX_LENGTH, 0.9, seed=config.run.seed)
    prompts, made = read_prompt_tokens(grpo_dir), {}
    tokens = [Prompt(index, prompts[index].tokens, (END,)) for index in order]
    sample(torch_reference.initial_model(config).eval(), tokens, sampling, made.__setitem__, step=1)
    lengths = [len(completion) for found in made.values() for completion in found.tokens]
    assert lines[0]["num_input_tokens"] == sum(lengths) and lines[0]["reward"] == pytest.approx(-np.mean(lengths) / 4)
    assert lines[0]["entropy"] == pytest.approx(sum(found.entropy for found in made.values()) / sum(lengths))
    assert lines[0]["sampling/sampling_logp_difference/max"] < 1e-6


@pytest.mark.parametrize("beta", [0.0, 0.1])
def test_a_shared_prompt_changes_no_loss_and_no_gradient(run, monkeypatch, beta):
    """Compared with one completion per microbatch. In the third step, which has two prompts, a third rank has none."""
    settings = {"rl__beta": beta, "data__max_tokens_per_microbatch": 40}
    shared, _ = run("shared", **settings)
    monkeypatch.setattr(families, "_unpacked_reason", lambda module: "a test")
    alone, _ = run("alone", **settings)
    for name in {"reward", "loss", "grad_norm", "kl", "entropy"} & shared[0].keys():
        assert [line[name] for line in alone] == pytest.approx([line[name] for line in shared], rel=1e-6, abs=1e-6)


def trained_groups(lines):
    return [
        (line["reward"], line["loss"], line["completions/mean_length"], line["num_input_tokens"], line["entropy"])
        for line in lines
    ]


def test_who_trains_what_changes_nothing(world, run, monkeypatch):
    """Ranks train their own groups; then any idle rank does, with a slow rank."""
    changes = {"optim__adam_epsilon": 1e-3}
    not_shared, summary = run("not_shared", **changes, rl__store_bytes=0)
    assert summary["groups_claimed_from_other_ranks"] == 0
    report = RolloutSource._report_token

    def slowed(source, token):
        time.sleep(0.05 * (world.rank == world.size - 1))
        report(source, token)

    monkeypatch.setattr(RolloutSource, "_report_token", slowed)
    shared, _ = run("shared", **changes)
    np.testing.assert_allclose(trained_groups(shared), trained_groups(not_shared), rtol=2e-5, atol=2e-6)
    for line in not_shared + shared:
        trained = 6 if (line["step"] - 1) % 3 < 2 else 2  # fourteen prompts in steps of six
        equal = round(line["frac_reward_zero_std"] * trained)
        assert line["groups_generated_max"] <= trained
        assert line["groups_not_stored"] == (trained - equal if line in not_shared else 0)
    assert sum(line["groups_claimed_from_other_ranks"] for line in shared) > 0


@pytest.mark.sizes(2)
def test_a_rank_that_generates_or_waits_for_groups_serves_the_other(world, run, monkeypatch):
    waiting, reported, wait, score = [], [], RolloutSource._wait, RolloutSource._score_group
    tokens, report = [], RolloutSource._report_token

    def scored(source, *arguments):
        time.sleep(0.3 * world.rank)  # rank 1 has begun what rank 0 then waits for
        return score(source, *arguments)

    def waits(source, *arguments):
        waiting.append(None)
        wait(source, *arguments)
        waiting.pop()

    def reports(source, token):
        waiting.append(token)
        report(source, token)
        tokens.append(waiting.pop())

    def task():
        reported.extend(waiting)
        return False

    monkeypatch.setattr(RolloutSource, "_score_group", scored)
    monkeypatch.setattr(RolloutSource, "_report_token", reports)
    monkeypatch.setattr(RolloutSource, "_wait", waits)
    world.progress.add(task)
    run("waiting", run__steps=1)
    world.progress.remove(task)
    assert [token for token in reported if token is not None] == tokens
    assert None in reported or world.rank == 1


@pytest.mark.sizes(2)
def test_groups_of_equal_rewards_train_nothing_count_and_warn_once(world, run, grpo_dir, capfd):
    rewards = only_reward(grpo_dir, "equal")
    lines, _ = run(**rewards, rl__max_completion_length=1, run__steps=2)
    for line in lines:
        assert line["frac_reward_zero_std"] == 1 and line["groups_trained_max"] == 0 and line["loss"] == 0
        assert line["num_tokens"] == line["num_input_tokens"] > 0 and line["grad_norm"] == 0
    warned = capfd.readouterr().err
    for words in ("the rewards of each prompt's completions are all equal", "100% of the completions were truncated"):
        assert warned.count(f"step 1: {words}") == warned.count(words) == (world.rank == 0)
    prompts = read_prompt_tokens(grpo_dir)
    ends = [f"after the end of its prompt, such as {prompts[index].prompt!r}" for index in range(len(prompts))]
    assert sum(words in warned for words in ends) == (world.rank == 0)


ADAM = {"optim__adam_epsilon": 1e-3, "optim__learning_rate": 3e-3}


def test_a_run_goes_on_at_a_step_on_other_ranks_with_what_it_would_have_generated(world, run):
    changes = ADAM | {"rl__log_completions": 1, "run__checkpoint_every": 2, "run__dir": run.base / "on"}
    whole, _ = run("whole", **ADAM, rl__log_completions=1)
    alone = world.split("self")
    if world.rank == 0:
        train(make_settings(run.path, **(changes | {"run__steps": 3})), alone)
        shutil.rmtree(steps_in(run.base / "on" / "checkpoints")[3])  # as if it had ended before it could save
    world.gather_objects(None)
    found, _ = run(**changes)
    assert list(steps_in(run.base / "on" / "checkpoints")) == [2, 4]
    np.testing.assert_allclose(trained_groups(found), trained_groups(whole), rtol=2e-5, atol=2e-6)
    texts = [(run.base / name / "completions.jsonl").read_text().splitlines() for name in ("whole", "on")]
    shown, again = ([json.loads(line) for line in text] for text in texts)
    assert [line["step"] for line in shown] == [step for step in (1, 2, 3, 4) for _ in range(NUM_GENERATIONS)]
    assert [(line["prompt"], line["completion"]) for line in again] == [
        (line["prompt"], line["completion"]) for line in shown
    ]
    assert set(shown[0]["rewards"]) == {"ends_early", "even"}


@pytest.mark.sizes(2)
def test_prompts_have_the_date_of_the_first_start_on_all_ranks(world, run, grpo_dir, monkeypatch):
    tokenizer, prompts = number_words(END), grpo_dir / "dated.jsonl"
    tokenizer.chat_template = "{{ strftime_now('%d') }}{% for m in messages %} {{ m.content }}{% endfor %}"
    if world.rank == 0:
        tokenizer.save_pretrained(grpo_dir / "dated")
        chats = ({"messages": [{"role": "user", "content": f"{i} {i + 1}"}]} for i in range(1, 7))
        prompts.write_text("\n".join(map(json.dumps, chats)))
    world.gather_objects(None)
    rewards = only_reward(grpo_dir, "ends_early")
    changes = rewards | {"data__path": prompts, "rl__tokenizer": grpo_dir / "dated", "run__checkpoint_every": 1}
    for step, day in ((1, 11), (2, 21)):
        now = datetime(2024, 12, day + world.rank)  # midnight has passed on rank 1 only
        monkeypatch.setattr(training_run, "datetime", SimpleNamespace(now=lambda now=now: now))
        lines, _ = run("dated", **changes, run__steps=step)
        assert len(lines) == step
        with Checkpoint(steps_in(run.base / "dated" / "checkpoints")[step]) as checkpoint:
            assert checkpoint.manifest.metadata["prompt_time"] == "2024-12-11T00:00:00"


@pytest.mark.sizes(2)
def test_evaluation_is_greedy_and_training_does_not_notice(world, run, grpo_dir, monkeypatch):
    rewards = only_reward(grpo_dir, "ends_early")
    usual, _ = run("usual", **ADAM, **rewards)
    settings = {"data__eval_path": grpo_dir / "prompts.jsonl", "data__eval_sequences": 5, "run__eval_every": 2}
    doing, set_status = [], world.set_status
    monkeypatch.setattr(world, "set_status", lambda what, *rest: (doing.append(what), set_status(what, *rest)))
    (start, *found), summary = run("evaluated", **ADAM, **rewards, **settings, run__eval_on_start="true")
    assert [line["reward"] for line in found] == pytest.approx([line["reward"] for line in usual], rel=1e-5)
    assert [line["step"] for line in found if "eval_reward" in line] == [2, 4]
    assert f"evaluating, token 2 of {MAX_LENGTH}" in doing, "what others that wait for this rank print"
    model = torch_reference.initial_model(make_settings(grpo_dir)).eval()
    prompts = read_prompt_tokens(grpo_dir)
    lengths = [len(greedy_completion(model, prompts[index].tokens, MAX_LENGTH, END)) for index in range(5)]
    assert start["eval_reward"] == pytest.approx(-np.mean(lengths) / 4)
    assert start["eval_mean_length"] == np.mean(lengths) and start["eval_exact_match"] == 0
    assert summary["eval_reward"] == found[-1]["eval_reward"]


@pytest.mark.sizes(2)
def test_the_checkpoint_with_the_highest_reward_is_kept(run, grpo_dir):
    settings = {"data__eval_path": grpo_dir / "prompts.jsonl", "run__eval_every": 1, "run__checkpoint_every": 1}
    settings |= {"run__steps": None, "run__num_train_epochs": 1.5, "run__keep_checkpoints": 1, "run__keep_best": "true"}
    lines, summary = run(**ADAM, **settings, **only_reward(grpo_dir, "ends_early"))
    found = {line["step"]: line["eval_reward"] for line in lines}
    assert len(found) == 5 and len({*found.values()}) > 1  # three steps of the first pass over 14 prompts, two more
    best = max(found, key=found.get)
    assert summary["best_checkpoint"] == best
    assert list(steps_in(run.base / "run" / "checkpoints")) == sorted({best, 5})


@pytest.mark.sizes(2)
def test_a_reward_model_scores_the_completions(world, run, grpo_dir):
    directory = grpo_dir / "scores"
    if world.rank == 0:
        torch.manual_seed(2)
        # Not qwen2: beside such a model, transformers splits numbers into digits.
        config = transformers.AutoConfig.for_model(**QWEN2 | {"model_type": "llama"}, num_labels=1, pad_token_id=0)
        transformers.AutoModelForSequenceClassification.from_config(config).save_pretrained(directory)
        number_words(END).save_pretrained(directory)
    world.gather_objects(None)
    functions = {"rl__reward_funcs": directory, "rl__reward_weights": "[1.0]"}
    [line], _ = run(**functions, rl__log_completions=1, run__steps=1)
    assert line["rewards/scores/mean"] == line["reward"] and line["num_tokens"] > 0
    model = transformers.AutoModelForSequenceClassification.from_pretrained(directory).eval()
    logged = [json.loads(line) for line in (run.base / "run" / "completions.jsonl").read_text().splitlines()]
    for line in logged:
        tokens = [*map(int, line["prompt"].split()), *map(int, line["completion"].split()), END]
        assert line["reward"] == pytest.approx(model(torch.tensor([tokens])).logits.item(), abs=1e-5)


@pytest.mark.sizes(2)
def test_rewards_that_fail_are_left_out_and_counted(world, run, grpo_dir):
    if world.rank == 0:
        code = "def wrong(completion_ids, wanted, **kwargs):\n    if wanted[0]:\n        raise KeyError('x')\n"
        (grpo_dir / "wrong.py").write_text(code + "    return [-float(len(tokens)) for tokens in completion_ids]\n")
    world.gather_objects(None)
    settings = {"rl__reward_funcs": f"{grpo_dir}/wrong.py:wrong", "rl__reward_weights": "[1]", "run__steps": 2}
    lines, summary = run(**settings, rl__skip_failed_rewards="true")
    assert summary["failed_rewards"] == sum(line["failed_rewards"] for line in lines) > 0
    assert all(line["failed_rewards"] % NUM_GENERATIONS == 0 for line in lines)


@pytest.mark.sizes(2)
@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"rl__max_completion_length": 60}, "exceed the model's max_position_embeddings, 64"),
        ({"data__max_tokens_per_microbatch": 12}, "exceed data.max_tokens_per_microbatch, 12"),
        ({"rl__reward_funcs": "nothing", "rl__reward_weights": "[1]"}, "one of exact_match"),
        ({"rl__reward_funcs": "statistics:fmean", "rl__reward_weights": "[1]"}, "'data': .*wanted, answer"),
    ],
)
def test_mismatches_are_reported_before_anything_is_written(world, grpo_dir, changes, words):
    with pytest.raises(AllRanksUserError, match=words):
        train(make_settings(grpo_dir, run__dir=grpo_dir / "refused", **changes), world)
    assert not (grpo_dir / "refused").exists()


@pytest.mark.sizes(2)
def test_a_teacher_with_adapters_is_that_of_its_merged_weights(world, run, grpo_dir, teacher_dir):
    adapters = {"lora__r": 4, "optim__learning_rate": 0.1, "run__steps": 1, "optim__warmup_steps": 0}
    run("adapters", **adapters, model__path=teacher_dir)
    if world.rank == 0:
        with open_newest_checkpoint(run.base / "adapters") as checkpoint:
            export(checkpoint, run.base / "merged", merge=True)
        (run.base / "merged" / "tokenizer.json").unlink()  # beside qwen2, transformers changes its vocabulary
    world.gather_objects(None)
    found = [
        run(f"from_{path.name}", **distillation(path), run__steps=1)[0][0]["kl"]
        for path in (run.base / "adapters", run.base / "merged", teacher_dir)
    ]
    assert found[0] == pytest.approx(found[1], rel=1e-5) != pytest.approx(found[2], rel=1e-3)


@pytest.mark.sizes(2)
@pytest.mark.parametrize(
    ("changes", "added", "words"),
    [
        ({"vocab_size": 63}, [], "rl.teacher_path: .*: expected 64 tokens, as many as the model has, got 63: "),
        ({}, ["a"], "rl.teacher_path: .*: expected the tokenizer of the prompts, got another voc"),
        ({"max_position_embeddings": 16}, [], "expected positions for prompts and completions of 18 tokens, got 16"),
    ],
)
def test_teachers_that_cannot_score_the_completions_are_refused(world, grpo_dir, base, changes, added, words):
    if world.rank == 0:
        # Not qwen2: beside such a model, transformers splits numbers into digits.
        write_teacher(base, model_type="llama", **changes)
        tokenizer = number_words(END)
        tokenizer.add_tokens(added)
        tokenizer.save_pretrained(base)
    world.gather_objects(None)
    with pytest.raises(AllRanksUserError, match=words):
        train(make_settings(grpo_dir, **distillation(base), run__dir=grpo_dir / "refused"), world)
    assert not (grpo_dir / "refused").exists()


@pytest.mark.sizes(2)
@pytest.mark.parametrize("objective", ["grpo", "distill"])
def test_an_exact_run_that_goes_on_alone_has_the_same_bits(world, grpo_dir, teacher_dir, base, objective):
    usual = {"run__exact": "true", "run__trace_steps": 0, "run__steps": 3}
    usual |= distillation(teacher_dir) if objective == "distill" else {}
    exact = ExactRuns(world, base, lambda folder, changes: make_settings(grpo_dir, **usual | changes, run__dir=folder))
    wanted, wanted_lines = exact.alone()
    _, begin = exact.train("first", world, run__checkpoint_every=1, run__steps=1)
    resume = exact.base / "first" / "checkpoints" / "step_00000001"
    digest, end = exact.train("second", world.split("self"), run__checkpoint_every=1, run__resume=resume)
    assert [*begin, *end] == wanted_lines
    assert digest == wanted
