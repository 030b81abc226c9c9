"""Log-probabilities in blocks of the head, also of answers that share a prompt, and their gradients."""

import pytest
import torch
import transformers
from packed_models import packed_model, plain_model
from pair_files import random_groups, rollout_group
from tiny_configurations import tiny_config
from torch.nn.functional import cross_entropy, linear
from transformers import AutoConfig, AutoModelForCausalLM

from odc_mpi.data.groups import as_padded_rows, group_microbatches, pack_groups
from odc_mpi.models import attention, token_logps
from odc_mpi.models.decoding import Prompt
from odc_mpi.models.quirks.logit_transform import LogitTransform
from odc_mpi.models.token_logps import ChunkedLogps, TokenLogps
from odc_mpi.rollout.decode import sample
from odc_mpi.rollout.sampling import RolloutSamplingParams

TRANSFORMS = {
    "linear": LogitTransform(),
    "temperature": LogitTransform(temperature=0.7),
    "scale": LogitTransform(scale=3.0, temperature=0.7),
    "soft cap": LogitTransform(scale=2.0, soft_cap=1.5, temperature=0.7),
}


def transformed(logits, transform):
    logits = logits * transform.scale
    if transform.soft_cap is not None:
        logits = torch.tanh(logits / transform.soft_cap) * transform.soft_cap
    return logits / transform.temperature


@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("with_bias", [True, False])
@pytest.mark.parametrize("num_blocks", [1, 4])
def test_they_are_the_formula(monkeypatch, transform, with_bias, num_blocks):
    monkeypatch.setitem(token_logps.MAX_ELEMENTS, "cpu", 13 * (10 if num_blocks == 1 else 3))
    transform = TRANSFORMS[transform]
    torch.manual_seed(0)
    hidden, weight, bias = (torch.randn(*shape).double().requires_grad_() for shape in ((10, 4), (13, 4), (13,)))
    bias = bias if with_bias else None
    targets, upstream = torch.randint(13, (10,)), torch.randn(10).double()
    inputs = [tensor for tensor in (hidden, weight, bias) if tensor is not None]
    distribution = torch.distributions.Categorical(logits=transformed(linear(hidden, weight, bias), transform))
    wanted = distribution.log_prob(targets)
    found, entropy, is_top = ChunkedLogps.apply(hidden, weight, bias, targets, transform)
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(entropy, distribution.entropy(), rtol=1e-12, atol=1e-12)
    assert torch.equal(is_top, distribution.logits.argmax(-1) == targets) and not entropy.requires_grad
    gradients = torch.autograd.grad(found, inputs, upstream)
    torch.testing.assert_close(gradients, torch.autograd.grad(wanted, inputs, upstream), rtol=1e-12, atol=1e-12)


def test_no_tokens_have_gradients_of_zero():
    hidden, weight = torch.randn(0, 4, requires_grad=True), torch.randn(13, 4, requires_grad=True)
    found = ChunkedLogps.apply(hidden, weight, None, torch.zeros(0, dtype=torch.int64), LogitTransform())
    assert [len(part) for part in found] == [0, 0, 0]
    gradient = torch.autograd.grad(found[0].sum(), [hidden, weight])
    assert gradient[0].shape == (0, 4) and torch.equal(gradient[1], torch.zeros(13, 4))


def test_the_gradient_of_a_16_bit_head_is_summed_in_32_bits(monkeypatch):
    """512 blocks of one position each. A sum of 16 bits would stop growing at 256."""
    monkeypatch.setitem(token_logps.MAX_ELEMENTS, "cpu", 2)
    hidden, weight = torch.ones(512, 1).bfloat16(), torch.zeros(2, 1).bfloat16().requires_grad_()
    found = ChunkedLogps.apply(hidden, weight, None, torch.zeros(512, dtype=torch.int64), LogitTransform())
    (gradient,) = torch.autograd.grad(found[0], weight, torch.full((512,), 2.0))
    assert gradient.dtype == torch.bfloat16 and gradient.tolist() == [[512.0], [-512.0]]


SIZES = {"vocab_size": 61, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
FAMILIES = {
    "llama": ({**SIZES}, LogitTransform()),
    "gpt_neox": ({**SIZES}, LogitTransform()),
    "gemma2": ({**SIZES, "final_logit_softcapping": 2.5, "head_dim": 8}, LogitTransform(soft_cap=2.5)),
    "cohere": ({**SIZES, "logit_scale": 0.25}, LogitTransform(scale=0.25)),
    "granite": ({**SIZES, "logits_scaling": 4.0}, LogitTransform(scale=0.25)),
    "hyperclovax": ({**SIZES, "logits_scaling": 4.0}, LogitTransform(scale=4.0)),
    "opt": ({"vocab_size": 61, "hidden_size": 32, "ffn_dim": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
             "word_embed_proj_dim": 32}, LogitTransform()),
    "mixtral": ({**SIZES, "num_key_value_heads": 2, "num_local_experts": 2, "output_router_logits": True},
                LogitTransform()),
}  # fmt: skip


def real(kind):
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **FAMILIES[kind][0])).eval()


@pytest.mark.parametrize("kind", FAMILIES)
def test_the_loss_of_a_model_is_that_of_transformers(kind):
    model = real(kind)
    for parameter in model.parameters():
        parameter.data *= 4.0  # logits that a soft cap changes
    tokens = torch.randint(61, (1, 9))
    labels = tokens.clone()
    labels[0, :3] = labels[0, 6] = -100
    wanted = model(input_ids=tokens, labels=labels, use_cache=False)
    positions = (labels[0, 1:] != -100).nonzero()[:, 0]
    compute = TokenLogps(model)
    assert compute._transform == FAMILIES[kind][1]
    found = compute({"input_ids": tokens, "labels": labels, "use_cache": False}, positions, tokens[0, positions + 1])
    loss = -found.logps.mean() + (0.0 if found.router_loss is None else found.router_loss)
    assert (found.router_loss is None) == (kind != "mixtral")
    torch.testing.assert_close(loss, wanted.loss, rtol=1e-6, atol=1e-6)
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    pairs = (torch.autograd.grad(value, parameters, allow_unused=True) for value in (loss, wanted.loss))
    for one, other in zip(*pairs, strict=True):
        bound = 1e-6 + 1e-5 * (0.0 if other is None else float(other.abs().max()))
        torch.testing.assert_close(one, other, rtol=0, atol=bound)
    assert "forward" not in model.get_output_embeddings().__dict__


def test_unknown_functions_and_wrapped_heads_use_all_logits():
    model = real("llama")
    plain = TokenLogps(model)
    tokens, positions, targets = torch.randint(61, (1, 9)), torch.tensor([2, 3, 6]), torch.tensor([4, 60, 0])
    wanted = plain({"input_ids": tokens}, positions, targets, 0.5)
    model.lm_head = torch.nn.Sequential(model.lm_head)
    wrapped = TokenLogps(model)
    forward = model.forward
    model.forward = lambda **inputs: forward(**inputs | {"use_cache": False})
    assert plain._transform is not None and wrapped._transform is None
    for found, expected in zip(wrapped({"input_ids": tokens}, positions, targets, 0.5), wanted, strict=True):
        assert found is expected is None or torch.allclose(found.float(), expected.float(), rtol=1e-5, atol=1e-6)

    def odd(**inputs):
        output = forward(**inputs)
        output.logits = output.logits.sin()
        return output

    model.lm_head = model.lm_head[0]
    model.forward = odd
    assert TokenLogps(model)._transform is None
    found = TokenLogps(model)({"input_ids": tokens}, positions, targets).logps
    logits = model(input_ids=tokens).logits[0, positions]
    torch.testing.assert_close(found, -cross_entropy(logits, targets, reduction="none"), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("temperature", [0.7, 1.3])
@pytest.mark.parametrize("sharpness", [1.0, 4.0])
def test_those_of_training_are_those_of_sampling_and_of_the_formula(temperature, sharpness):
    """To 1e-6, of the log-probability where that is beyond 1: float32 holds seven digits of it."""
    model, exact = packed_model().eval(), plain_model().double()
    for each in (model, exact):
        for parameter in each.parameters():
            parameter.data *= sharpness if parameter.ndim > 1 else 1.0
    tokens, made = [[5, 7, 9], list(range(1, 12)), [60]], {}
    prompts = [Prompt(i, prompt, (3,)) for i, prompt in enumerate(tokens)]
    sample(model, prompts, RolloutSamplingParams(8, 20, temperature, seed=1), made.__setitem__)
    groups = [rollout_group(prompt, made[i].tokens, made[i].logps) for i, prompt in enumerate(tokens)]
    batches, compute, wanted = list(group_microbatches(groups, 100)), TokenLogps(model), []
    assert len(batches) > 1 and all(batch.num_input_tokens <= 100 for batch in batches)
    found = torch.cat(
        [compute(each.inputs, each.logit_positions, each.targets, temperature).logps.detach() for each in batches]
    )
    sampled = torch.cat([batch.columns["logps"] for batch in batches])
    for i, prompt in enumerate(tokens):
        for completion in made[i].tokens:
            ids = torch.tensor([[*prompt, *completion]])
            logits = exact(input_ids=ids, use_cache=False).logits[0, len(prompt) - 1 : -1].double() / temperature
            wanted.append(torch.log_softmax(logits, -1).gather(1, torch.tensor(completion)[:, None])[:, 0].detach())
    bound = 1e-6 * torch.cat(wanted).abs().clamp(min=1.0)
    assert ((found - sampled).abs() <= bound).all()
    assert ((found - torch.cat(wanted)).abs() <= bound).all()
    assert ((sampled - torch.cat(wanted)).abs() <= bound).all()


#: Prompts and answers, longer and shorter than windows and chunks, which have 8 tokens.
PAIRS = [(3, 4, 2), (11, 5, 9), (1, 1, 1), (9, 1, 14)]
COUNTS = {"pairs": PAIRS, "groups": [(3, 4, 2, 6), (12, 3), (11, 5, 9, 5, 12), *PAIRS[2:], (2, 1, 1, 4, 1)]}


def build_eval(kind, implementation):
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
    models = build_eval(kind, attention.IMPLEMENTATIONS[implementation]), build_eval(kind, "eager")
    groups = random_groups(COUNTS[counts], vocab_size=512)
    microbatch = pack_groups(groups)
    assert microbatch.num_input_tokens == sum(map(sum, COUNTS[counts]))
    assert torch.bincount(microbatch.answers).tolist() == [n for _, *lengths in COUNTS[counts] for n in lengths]
    found = TokenLogps(models[0])(microbatch.inputs, microbatch.logit_positions, microbatch.targets).logps
    compare(found, expected_logps(models[1], groups), models)


@pytest.mark.parametrize("kind", ["qwen2", "mamba2"])
def test_other_models_get_a_row_per_answer(kind):
    models = build_eval(kind, None), build_eval(kind, "eager")
    for group in random_groups(COUNTS["groups"], vocab_size=512):
        rows = as_padded_rows(pack_groups([group]))
        found = TokenLogps(models[0])(rows.inputs, rows.logit_positions, rows.targets).logps
        compare(found, expected_logps(models[1], [group]), models)
