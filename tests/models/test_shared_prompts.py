"""Answers that share the tokens of their prompt have the log-probabilities and gradients of separate sequences."""

import pytest
import torch
import transformers
from pair_files import random_groups
from tiny_configurations import tiny_config

from odc_mpi.data.groups import as_padded_rows, pack_groups
from odc_mpi.models import attention
from odc_mpi.models.token_logps import TokenLogps

#: Prompts and answers, longer and shorter than windows and chunks, which have 8 tokens.
PAIRS = [(3, 4, 2), (11, 5, 9), (1, 1, 1), (9, 1, 14)]
COUNTS = {"pairs": PAIRS, "groups": [(3, 4, 2, 6), (12, 3), (11, 5, 9, 5, 12), *PAIRS[2:], (2, 1, 1, 4, 1)]}


def build(kind, implementation):
    torch.manual_seed(0)
    config = tiny_config(kind)
    if kind == "gemma2":
        config.attn_logit_softcapping = 0.05  # low, so that it counts
    config.use_cache = False
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation=implementation)
    for parameter in model.parameters():
        if parameter.ndim < 2:
            parameter.data.add_(0.1 * torch.randn_like(parameter))
    return model.eval()


def expected_logps(model, groups):
    """The log-probabilities of the answers, each computed as a sequence of its own."""
    logps = []
    for group in groups:
        for answer in group.answers:
            row = torch.tensor([*group.prompt.tolist(), *answer.tokens.tolist()])[None]
            logits = model(input_ids=row).logits[0, len(group.prompt) - 1 : -1]
            logps.append(logits.log_softmax(-1).gather(1, row[0, len(group.prompt) :, None])[:, 0])
    return torch.cat(logps)


def compare(found, expected, models):
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    upstream = torch.linspace(-1, 1, len(found))
    (found * upstream).sum().backward()
    (expected * upstream).sum().backward()
    for (name, one), other in zip(models[0].named_parameters(), models[1].parameters(), strict=True):
        if other.grad is not None:
            torch.testing.assert_close(one.grad, other.grad, rtol=1e-4, atol=2e-5, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize(
    ("kind", "implementation"),
    [
        *((kind, "sdpa") for kind in ("qwen2", "llama4_text", "gpt_oss", "gpt2", "mistral", "phimoe", "stablelm")),
        *((kind, "eager") for kind in ("gemma2", "mistral", "phimoe")),
    ],
)
@pytest.mark.parametrize("counts", COUNTS)
def test_attention_reads_the_prompt_of_the_group(counts, kind, implementation):
    attention.register()
    models = build(kind, attention.IMPLEMENTATIONS[implementation]), build(kind, "eager")
    groups = random_groups(COUNTS[counts], vocab_size=512)
    microbatch = pack_groups(groups)
    assert microbatch.num_input_tokens == sum(map(sum, COUNTS[counts]))
    assert torch.bincount(microbatch.answers).tolist() == [n for _, *lengths in COUNTS[counts] for n in lengths]
    found = TokenLogps(models[0])(microbatch.inputs, microbatch.logit_positions, microbatch.targets).logps
    compare(found, expected_logps(models[1], groups), models)


@pytest.mark.parametrize("kind", ["qwen2", "mamba2"])
def test_other_models_get_a_row_per_answer(kind):
    models = build(kind, None), build(kind, "eager")
    for group in random_groups(COUNTS["groups"], vocab_size=512):
        rows = as_padded_rows(pack_groups([group]))
        found = TokenLogps(models[0])(rows.inputs, rows.logit_positions, rows.targets).logps
        compare(found, expected_logps(models[1], [group]), models)
