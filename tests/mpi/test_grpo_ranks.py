"""Learning from rewards: the same completions, losses and gradients on any number of ranks, each group trained once."""

import json
import time

import numpy as np
import plain
import pytest
import torch
from test_parity import configure
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from odc_mpi.checkpoint.manifest import steps_in
from odc_mpi.data.prepare import Options
from odc_mpi.data.prompts.file import Prompts
from odc_mpi.data.prompts.prepare import prepare_prompts
from odc_mpi.errors import AgreedError
from odc_mpi.models import build as built_models
from odc_mpi.rollout.rewards import find_rewards, score
from odc_mpi.rollout.sample import GroupSampling, PromptTokens, sample
from odc_mpi.train.inputs import open_inputs
from odc_mpi.train.rl.source import RolloutSource
from odc_mpi.train.run import build_trainer, decide, train

pytestmark = [pytest.mark.mpi, pytest.mark.sizes(1, 2, 3)]

STEPS = 4
NUM_GENERATIONS = 4
MAX_LENGTH = 10
END = 60
REWARDS = """
def ends_early(completion_ids, **kwargs):
    return [-float(len(tokens)) / 4 for tokens in completion_ids]


def even(completion_ids, wanted, **kwargs):
    scores = [float(sum(token % 2 == want for token in tokens)) for tokens, want in zip(completion_ids, wanted)]
    return [None if tokens[0] % 7 == 0 else score for tokens, score in zip(completion_ids, scores)]


def equal(completions, **kwargs):
    return [1.0] * len(completions)
"""


@pytest.fixture(scope="module")
def grpo_dir(world, shared_dir):
    """Prompts of numbers, some of them held out, and rewards."""
    path = shared_dir / "grpo"
    if world.rank == 0:
        path.mkdir()
        inner = Tokenizer(models.WordLevel({str(i): i for i in range(64)}, unk_token="0"))
        inner.pre_tokenizer = pre_tokenizers.Whitespace()
        PreTrainedTokenizerFast(tokenizer_object=inner, eos_token=str(END)).save_pretrained(path / "words")
        draws = np.random.default_rng(3)
        lines = [
            {
                "prompt": " ".join(map(str, draws.integers(1, 60, size=draws.integers(1, 9)))),
                "wanted": i % 2,
                "answer": "1",
            }
            for i in range(14)
        ]
        (path / "prompts.jsonl").write_text("\n".join(map(json.dumps, lines)))
        prepare_prompts([str(path / "prompts.jsonl")], path / "prompts.h5", Options(tokenizer=path / "words"))
        (path / "rewards.py").write_text(REWARDS)
    world.gather_objects(None)
    return path


def settings_of(path, **changes):
    usual = {
        "run.objective": "grpo",
        "rl.reward_funcs": f"['{path}/rewards.py:ends_early', '{path}/rewards.py:even']",
        "rl.reward_weights": "[0.5, 1.0]",
        "rl.num_generations": NUM_GENERATIONS,
        "rl.max_completion_length": MAX_LENGTH,
        "rl.max_concurrent_sequences": 2 * NUM_GENERATIONS,
        "data.minibatch_sequences": 6 * NUM_GENERATIONS,
        "data.max_tokens_per_microbatch": 60,
        "optim.lr_scheduler_type": "constant",
        "run.steps": STEPS,
    }
    return configure(path / "prompts.h5", **(usual | {key.replace("__", "."): value for key, value in changes.items()}))


@pytest.fixture
def run(world, grpo_dir, request):
    """`run(name, **settings)` trains; returns the lines of metrics and the summary."""
    base = grpo_dir / "".join(c if c.isalnum() else "_" for c in request.node.name)

    def start(name="run", **changes):
        changes = {"run__dir": base / name} | changes
        summary = train(settings_of(grpo_dir, **changes), world)
        world.gather_objects(None)
        lines = [json.loads(line) for line in (changes["run__dir"] / "metrics.jsonl").read_text().splitlines()]
        return lines, summary

    start.base = base
    return start


def formula(config, path, loss_type, scale, mask_truncated, beta, steps):
    """The same training in plain torch: one process, padded batches, formulas of TRL's documentation."""
    policy = plain.model(built_models.from_config(config.model.config, config.run.seed), config.model.config)
    reference = plain.model(built_models.from_config(config.model.config, config.run.seed), config.model.config)
    prompts = Prompts(path / "prompts.h5")
    rewards = find_rewards(config.rl.reward_funcs, config.rl.reward_weights)
    optimizer = torch.optim.SGD(policy.parameters(), config.optim.learning_rate)
    order = np.random.default_rng([config.run.seed, 0]).permutation(len(prompts))
    per_step = config.data.minibatch_sequences // NUM_GENERATIONS
    results = []
    for step in range(steps):
        indices = order[step * per_step : (step + 1) * per_step].tolist()
        made = {}
        for index in indices:
            row = prompts[index]
            sampling = GroupSampling(
                NUM_GENERATIONS, MAX_LENGTH, config.rl.temperature, seed=config.run.seed, step=step + 1
            )
            tokens = PromptTokens(index, row.tokens, frozenset({END}))
            sample(policy.eval(), [tokens], sampling, lambda _, found, i=index, to=made: to.__setitem__(i, found))
        total, num_tokens, num_sequences, all_rewards, terms = 0.0, 0, 0, [], []
        for index in indices:
            row, found = prompts[index], made[index]
            arguments = {"completions": [""] * NUM_GENERATIONS, "completion_ids": found.tokens, "prompts": [""] * 4}
            arguments["wanted"] = [row.columns["wanted"]] * NUM_GENERATIONS
            total_rewards = torch.from_numpy(score(rewards, arguments, 0, 0, timeout_s=9.0, skip=False).total)
            all_rewards += total_rewards.tolist()
            advantages = total_rewards - total_rewards.mean()
            if scale == "group":
                advantages = advantages / (total_rewards.std() + 1e-4)
            for tokens, advantage, stopped in zip(found.tokens, advantages, found.stopped, strict=True):
                num_sequences += 1
                if mask_truncated and not stopped:
                    continue
                num_tokens += len(tokens)
                ids = torch.tensor([[*row.tokens, *tokens]])
                start = len(row.tokens) - 1

                def logps(model, ids=ids, start=start, tokens=tokens):
                    logits = model(input_ids=ids, use_cache=False).logits[0, start:-1] / config.rl.temperature
                    return torch.log_softmax(logits, -1).gather(1, torch.tensor(tokens)[:, None])[:, 0]

                own = logps(policy)
                per_token = -torch.exp(own - own.detach()) * advantage.float()
                if beta:
                    with torch.no_grad():
                        theirs = logps(reference)
                    per_token = per_token + beta * (torch.exp(theirs - own) - (theirs - own) - 1)
                terms.append(per_token)
        if loss_type == "dapo":
            total = sum(term.sum() for term in terms) / num_tokens
        elif loss_type == "grpo":
            total = sum(term.mean() for term in terms) / num_sequences
        else:
            total = sum(term.sum() for term in terms) / (num_sequences * MAX_LENGTH)
        optimizer.zero_grad()
        total.backward()
        norm = torch.nn.utils.clip_grad_norm_(policy.parameters(), config.optim.max_grad_norm)
        optimizer.step()
        results.append((float(total.detach()), float(np.nanmean(all_rewards)), float(norm)))
    return results


CASES = [
    ("dapo", "group", False, 0.0),
    ("grpo", "group", False, 0.0),
    ("dr_grpo", "none", False, 0.0),
    ("dapo", "none", True, 0.1),
    ("grpo", "group", True, 0.1),
]


@pytest.mark.parametrize(("loss_type", "scale", "mask_truncated", "beta"), CASES)
def test_losses_gradients_and_steps_are_those_of_the_formulas(run, grpo_dir, loss_type, scale, mask_truncated, beta):
    changes = {
        "rl__loss_type": loss_type,
        "rl__scale_rewards": scale,
        "rl__mask_truncated_completions": str(mask_truncated).lower(),
        "rl__beta": beta,
        "rl__reward_funcs": f"{grpo_dir}/rewards.py:ends_early",
        "rl__reward_weights": "[1.0]",
        "rl__temperature": 0.9,
        "run__steps": 2,
        "optim__optimizer": "sgd",
        "optim__learning_rate": 0.05,
        "optim__warmup_steps": 0,
        "optim__weight_decay": 0.0,
    }
    config = settings_of(grpo_dir, **changes)
    lines, _ = run(**changes)
    wanted = formula(config, grpo_dir, loss_type, scale, mask_truncated, beta, 2)
    found = [(line["loss"], line["reward"], line["grad_norm"]) for line in lines]
    np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=2e-6)
    assert max(line["sampling/sampling_logp_difference/max"] for line in lines) < 5e-6
    assert ("kl" in lines[0]) == (beta > 0)


def slow_down(monkeypatch, world, slow_rank):
    """Have a rank generate slowly, so that others come first to what it made."""
    draw = RolloutSource._generate

    def slowed(source, *arguments):
        if world.rank == slow_rank:
            time.sleep(0.15)
        return draw(source, *arguments)

    monkeypatch.setattr(RolloutSource, "_generate", slowed)


def trained_groups(lines):
    return [
        (line["reward"], line["loss"], line["completions/mean_length"], line["num_input_tokens"], line["entropy"])
        for line in lines
    ]


@pytest.mark.parametrize("store_bytes", [0, 700, 1 << 20])
def test_who_trains_what_changes_nothing(world, run, monkeypatch, store_bytes):
    """With a store that is always full, one for about one group, and one for all; and with a slow rank."""
    changes = {"optim__adam_epsilon": 1e-3, "rl__store_bytes": store_bytes}
    usual, summary = run("usual", **changes)
    slow_down(monkeypatch, world, slow_rank=world.size - 1)
    slowed, _ = run("slowed", **changes)
    np.testing.assert_allclose(trained_groups(slowed), trained_groups(usual), rtol=2e-5, atol=2e-6)
    for line in usual + slowed:
        learnt = 6 if (line["step"] - 1) % 3 < 2 else 2  # fourteen prompts in steps of six
        assert line["groups_generated_max"] <= learnt
        equal = round(line["frac_reward_zero_std"] * learnt)
        assert line["groups_kept"] <= learnt - equal
        assert (line["groups_kept"] == learnt - equal) == (store_bytes == 0 or learnt == equal) or store_bytes == 700
    assert summary["groups_from_others"] == 0 or world.size > 1
    if world.size > 1 and store_bytes == 1 << 20:
        assert sum(line["groups_from_others"] for line in slowed) > 0


def test_ranks_make_the_same_as_one(world, run, grpo_dir):
    """Against a loop of one rank: what it generates, decoded in the same batches, and what becomes of it."""
    changes = {"rl__max_concurrent_sequences": 2 * NUM_GENERATIONS, "optim__adam_epsilon": 1e-3}
    lines, _ = run("all", **changes)
    assert [line["step"] for line in lines] == list(range(1, STEPS + 1))
    alone = world.alone()
    if world.rank == 0:
        config = settings_of(grpo_dir, **changes)
        trainer = build_trainer(config, alone, open_inputs(config, 0, 1), decide(config, alone))
        with trainer:
            trainer.start()
            wanted = [trainer.step() for _ in range(STEPS)]
        np.testing.assert_allclose(trained_groups(lines), trained_groups(wanted), rtol=2e-5, atol=2e-6)
    world.gather_objects(None)


def test_groups_of_equal_rewards_train_nothing_and_count(run, grpo_dir):
    lines, _ = run(rl__reward_funcs=f"{grpo_dir}/rewards.py:equal", rl__reward_weights="[1.0]", run__steps=2)
    for line in lines:
        assert line["frac_reward_zero_std"] == 1 and line["groups_trained_max"] == 0 and line["loss"] == 0
        assert line["num_tokens"] == line["num_input_tokens"] > 0 and line["grad_norm"] == 0


ADAM = {"optim__adam_epsilon": 1e-3, "optim__learning_rate": 3e-3}


def test_a_run_goes_on_at_a_step_with_what_it_would_have_generated(run):
    changes = ADAM | {
        "rl__log_completions": 1,
        "run__checkpoint_every": 2,
        "run__steps": 4,
        "run__dir": run.base / "on",
    }
    whole, _ = run("whole", **ADAM, run__steps=4, rl__log_completions=1)
    run(**(changes | {"run__steps": 3}))
    found, _ = run(**changes)
    assert list(steps_in(run.base / "on" / "checkpoints")) == [2, 3, 4]
    np.testing.assert_allclose(trained_groups(found), trained_groups(whole), rtol=2e-5, atol=2e-6)
    texts = [(run.base / name / "completions.jsonl").read_text().splitlines() for name in ("whole", "on")]
    shown, again = ([json.loads(line) for line in own] for own in texts)
    assert [line["step"] for line in shown] == [step for step in (1, 2, 3, 4) for _ in range(NUM_GENERATIONS)]
    assert [(line["prompt"], line["completion"]) for line in again] == [
        (line["prompt"], line["completion"]) for line in shown
    ]
    assert set(shown[0]["rewards"]) == {"ends_early", "even"}


def test_evaluation_is_greedy_and_training_does_not_notice(world, run, grpo_dir):
    usual, _ = run("usual", **ADAM)
    settings = ADAM | {"data__eval_path": grpo_dir / "prompts.h5", "data__eval_sequences": 5, "run__eval_every": 2}
    found, summary = run("evaluated", **settings, run__eval_on_start="true")
    assert [line["reward"] for line in found] == pytest.approx([line["reward"] for line in usual], rel=1e-5)
    assert [line["step"] for line in found if "eval_reward" in line] == [2, 4]
    config = settings_of(grpo_dir)
    model = plain.model(built_models.from_config(config.model.config, config.run.seed), config.model.config).eval()
    wanted, lengths = [], []
    rewards = find_rewards(config.rl.reward_funcs, config.rl.reward_weights)
    with Prompts(grpo_dir / "prompts.h5") as prompts:
        for index in range(5):
            row = prompts[index]
            ids = torch.tensor([row.tokens])
            made = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=MAX_LENGTH,
                do_sample=False,
                eos_token_id=END,
                pad_token_id=0,
            )
            tokens = made[0, ids.shape[1] :].tolist()
            given = {
                "completions": [""],
                "prompts": [""],
                "completion_ids": [tokens],
                "wanted": [row.columns["wanted"]],
            }
            wanted.append(score(rewards, given, 0, 0, timeout_s=9.0, skip=False).total[0])
            lengths.append(len(tokens))
    assert found[0]["eval_reward_start"] == pytest.approx(np.nanmean(wanted), abs=1e-9)
    assert found[0]["eval_mean_length_start"] == np.mean(lengths) and found[0]["eval_exact_match_start"] == 0
    assert summary["eval_reward"] == found[-1]["eval_reward"]


def test_adapters_learn_and_without_them_is_the_reference(run):
    settings = {"lora__r": 4, "rl__beta": 0.5, "optim__learning_rate": 0.05}
    lines, _ = run(**settings)
    assert lines[0]["kl"] == 0 and lines[-1]["kl"] > 1e-6  # adapters begin as nothing
    assert max(line["sampling/sampling_logp_difference/max"] for line in lines) < 5e-6


def test_rewards_that_fail_are_left_out_and_counted(world, run, grpo_dir):
    if world.rank == 0:
        code = "def wrong(completion_ids, wanted, **kwargs):\n    if wanted[0]:\n        raise KeyError('x')\n"
        (grpo_dir / "wrong.py").write_text(code + "    return [-float(len(tokens)) for tokens in completion_ids]\n")
    world.gather_objects(None)
    settings = {"rl__reward_funcs": f"{grpo_dir}/wrong.py:wrong", "rl__reward_weights": "[1]", "run__steps": 2}
    lines, summary = run(**settings, rl__skip_failed_rewards="true")
    assert summary["failed_rewards"] == sum(line["failed_rewards"] for line in lines) > 0
    assert all(line["failed_rewards"] % NUM_GENERATIONS == 0 for line in lines)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"rl__max_completion_length": 60}, "more than the model's max_position_embeddings, 64"),
        ({"data__max_tokens_per_microbatch": 12}, "more than data.max_tokens_per_microbatch, 12"),
        ({"rl__reward_funcs": "nothing", "rl__reward_weights": "[1]"}, "one of exact_match"),
        ({"run__objective": "sft", "rl__reward_funcs": None, "rl__reward_weights": None}, "set run.objective to grpo"),
    ],
)
def test_what_does_not_fit_is_said_before_anything_is_written(world, grpo_dir, changes, words):
    if "run__objective" in changes:
        config = configure(grpo_dir / "prompts.h5", **{"run.dir": grpo_dir / "refused"})
    else:
        config = settings_of(grpo_dir, run__dir=grpo_dir / "refused", **changes)
    with pytest.raises(AgreedError, match=words):
        train(config, world)
    assert not (grpo_dir / "refused").exists()
