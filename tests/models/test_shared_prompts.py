"""Two answers that share the tokens of their prompt have the log-probabilities and gradients of two sequences."""

import pytest
import torch
import transformers
from pair_files import write_pairs
from tiny_configurations import tiny_config

from odc_mpi.data.dataset.reader import Dataset
from odc_mpi.data.pairs.microbatch import as_padded_rows, read_pairs
from odc_mpi.models import attention
from odc_mpi.models.token_logps import TokenLogps

#: Prompt, chosen and rejected answer; longer and shorter than windows and chunks, which have 8 tokens.
COUNTS = [(3, 4, 2), (11, 5, 9), (1, 1, 1), (9, 1, 14)]


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


def expected_logps(model, dataset, indices):
    """The log-probabilities of both answers of each pair, each computed as a sequence of its own."""
    logps = []
    for index in indices:
        tokens, _ = dataset[index]
        num_prompt, num_chosen, _ = dataset.pair_counts[index]
        end = num_prompt + num_chosen
        for answer in (tokens[num_prompt:end], tokens[end:]):
            row = torch.tensor([*tokens[:num_prompt], *answer])[None]
            logits = model(input_ids=row).logits[0, num_prompt - 1 : -1]
            logps.append(logits.log_softmax(-1).gather(1, torch.tensor(answer)[:, None])[:, 0])
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
def test_attention_reads_the_prompt_of_the_sequence_before(tmp_path, kind, implementation):
    attention.register()
    write_pairs(tmp_path / "pairs.h5", COUNTS, vocab_size=512)
    models = build(kind, attention.IMPLEMENTATIONS[implementation]), build(kind, "eager")
    with Dataset(tmp_path / "pairs.h5") as dataset:
        indices = [1, 0, 3, 2]
        microbatch = read_pairs(dataset, torch.tensor(indices).numpy())
        assert microbatch.num_input_tokens == dataset.lengths[indices].sum()
        assert torch.bincount(microbatch.answers).tolist() == [n for i in indices for n in COUNTS[i][1:]]
        found = TokenLogps(models[0])(microbatch.inputs, microbatch.logit_positions, microbatch.targets).logps
        compare(found, expected_logps(models[1], dataset, indices), models)


@pytest.mark.parametrize("kind", ["qwen2", "mamba2"])
def test_other_models_get_a_row_per_answer(tmp_path, kind):
    write_pairs(tmp_path / "pairs.h5", COUNTS, vocab_size=512)
    models = build(kind, None), build(kind, "eager")
    with Dataset(tmp_path / "pairs.h5") as dataset:
        for index in range(len(COUNTS)):
            rows = as_padded_rows(read_pairs(dataset, torch.tensor([index]).numpy()))
            found = TokenLogps(models[0])(rows.inputs, rows.logit_positions, rows.targets).logps
            compare(found, expected_logps(models[1], dataset, [index]), models)
