"""The answer to each family of causal models in transformers that tests/mpi/families does not train.

It packs, and then the outputs are those of single sequences; or it trains one sequence per microbatch; or it is refused
with a reason. Models that train are causal. Writes the second table of docs/models.md.
"""

import os
import re
from pathlib import Path

import pytest
import torch
import transformers
from packed_models import assert_packed_like_single
from tiny_configurations import FAMILIES, tiny_config
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from odc_mpi.errors import UserError
from odc_mpi.models import build as models
from odc_mpi.models.quirks.composite import find_composite

pytestmark = pytest.mark.slow

PAGE = Path(__file__).parents[2] / "docs" / "models.md"
HEADER = "| trains | families that are tried in one process |\n|---|---|\n"
#: Without gemma4_assistant, whose default configuration is invalid.
OTHERS = [f for f in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES if f not in (*FAMILIES, "gemma4_assistant")]
LENGTHS = [9, 1, 20]
WRITE = bool(os.environ.get("ODC_MPI_WRITE_TABLE"))


def text_config_of(family):
    """Return the configuration of the model that is trained, as for `model.path`."""
    with models._user_errors("model.path"):
        config = tiny_config(family)
        composite = find_composite(config)
    return composite.text_config if composite else config


def assert_causal(outputs, reference, tokens):
    """The outputs of a token do not depend on the next one."""
    changed = tokens.clone()
    changed[0, -1] += 1
    torch.testing.assert_close(reference(input_ids=changed, use_cache=False).logits[0, :-1], outputs[0, :-1])


def assert_packs(meta_model, reference, tokens):
    module = meta_model.module.eval()
    module.load_state_dict(reference.state_dict(), assign=True)
    module.tie_weights()
    assert_packed_like_single(module, reference, tokens[0], LENGTHS, rtol=1e-3, atol=1e-3)


def answer(family):
    try:
        config = text_config_of(family)
        meta_model = models.from_saved_config(config.to_dict())
    except UserError as error:
        sentence = str(error).partition(": ")[2].partition(". ")[0]
        return "no: " + re.sub(r"^\w+ (is|does)\b|, \w+$", r"\1", sentence)
    torch.manual_seed(0)
    kind = transformers.AutoModelForCausalLM
    reference = kind.from_config(config, attn_implementation="eager", dtype=torch.float32).eval()
    tokens = torch.randint(3, 500, (1, sum(LENGTHS)))
    with torch.no_grad():
        for parameter in reference.parameters():
            parameter.copy_(5 * parameter if parameter.ndim >= 2 else parameter + 0.1 * torch.randn_like(parameter))
        assert_causal(reference(input_ids=tokens, use_cache=False).logits, reference, tokens)
        if meta_model.packing.packs:
            assert_packs(meta_model, reference, tokens)
        elif meta_model.packing.pads_rows:
            assert_packs(meta_model, reference, tokens)
            return "in padded rows"
    return "packed" if meta_model.packing.packs else "one sequence per microbatch"


@pytest.fixture(scope="module")
def table():
    """The answer of each family in docs/models.md."""
    before, _, text = PAGE.read_text().partition(HEADER)
    rows = [line.strip("| ").split(" | ") for line in text.splitlines()]
    answers = {family: cell for cell, families in rows for family in families.split(", ")}
    yield answers
    if WRITE:
        families_of = {}
        for family in OTHERS:
            families_of.setdefault(answers.get(family), []).append(family)
        rows = "".join(f"| {cell} | {', '.join(families)} |\n" for cell, families in families_of.items())
        PAGE.write_text(before + HEADER + rows)


@pytest.mark.parametrize("family", OTHERS)
def test_answer(family, table):
    given = answer(family)
    if WRITE:
        table[family] = given
    assert table.get(family) == given, "write docs/models.md: ODC_MPI_WRITE_TABLE=1 python -m pytest " + __file__
