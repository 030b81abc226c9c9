"""Prompt groups as bytes, and packing of groups into microbatches, which count what they compute."""

import numpy as np
import pytest
from pair_files import random_groups

from odc_mpi.data.groups import PromptGroup, group_microbatches

GROUPS = random_groups([(5, 3, 4, 2), (7, 6), (30, 5, 5, 5, 20), (1, 1), (2, 9, 1)])


def rows(groups):
    """The tokens and the values of each answer, with its prompt."""
    for group in groups:
        for tokens, loss_mask, columns in group.answers:
            assert loss_mask.all()
            yield group.index, [*group.prompt], [*tokens], [*columns["logps"]], columns["advantage"]


def test_groups_survive_as_bytes():
    assert list(rows(map(PromptGroup.from_bytes, map(PromptGroup.to_bytes, GROUPS)))) == list(rows(GROUPS))
    assert len(GROUPS[2].to_bytes()) < 600 + 9 * GROUPS[2].num_tokens


@pytest.mark.parametrize(
    ("max_tokens", "packs", "num_tokens"),
    [
        (1000, True, [106]),
        (45, True, [27, 45, 50, 14]),  # a prompt of 30 twice
        (40, True, [27, 40, 35, 50, 14]),
        (1000, False, [8, 9, 7, 13, 35, 35, 35, 50, 2, 11, 3]),
    ],
)
def test_microbatches_count_a_prompt_once_and_repeat_it_after_a_split(max_tokens, packs, num_tokens):
    microbatches = list(group_microbatches(GROUPS, max_tokens, packs=packs))
    assert [microbatch.num_input_tokens for microbatch in microbatches] == num_tokens
    found = []
    for microbatch in microbatches:
        assert microbatch.inputs["input_ids"].shape == (1, microbatch.num_input_tokens)
        assert microbatch.num_tokens == len(microbatch.targets)
        bounds, key_bounds = (microbatch.inputs[f"cu_seq_lens_{name}"].tolist() for name in "qk")
        prompts = np.diff(key_bounds) - np.diff(bounds)
        tokens, positions = (microbatch.inputs[name][0].numpy() for name in ("input_ids", "position_ids"))
        begin = 0
        for answer, advantage in enumerate(microbatch.columns["advantage"].tolist()):
            begin = begin if prompts[answer] else bounds[answer]
            is_answer = (microbatch.answers == answer).numpy()
            seen = [*tokens[begin : begin + prompts[answer]], *tokens[bounds[answer] : bounds[answer + 1]]]
            prompt, targets = seen[: -is_answer.sum()], microbatch.targets[is_answer].tolist()
            assert seen == [*prompt, *targets]
            # The logits for a target are at the position before it.
            expected = range(len(prompt) - 1, len(seen) - 1)
            assert positions[microbatch.logit_positions.numpy()[is_answer]].tolist() == [*expected]
            found.append((prompt, targets, microbatch.columns["logps"][is_answer].tolist(), advantage))
    assert found == [(prompt, answer, logps, advantage) for _, prompt, answer, logps, advantage in rows(GROUPS)]
    indices = [index for microbatch in microbatches for index in microbatch.indices.tolist()]
    assert sorted(set(indices)) == [group.index for group in GROUPS]
