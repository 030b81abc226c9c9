"""Tokenizers with other chat templates: any, or those of published models, which the package trl contains."""

import copy
import re
from importlib.util import find_spec
from pathlib import Path

#: Text that models add as special tokens to their tokenizers, in the source of their templates.
SPECIAL = (
    r"<[|\uff5c][^<>\s'\"]*?[|\uff5c]>|<\|?(?:channel|tool|tool_call|tool_response|turn)\|?>|</?think>|\[gMASK\]|<sop>"
    r"|<(?:start|end)_of_turn>"
)
#: Templates of models that read images, whose content is not a string.
VISION = {"idefics3", "lfm2_2_5_vl", "llava_next", "qwen2_5_vl", "qwen3_vl", "smolvlm"}


def template_paths():
    spec = find_spec("trl")  # not imported: it needs packages that are not installed
    folder = Path(next(iter(spec.submodule_search_locations or ()))) / "chat_templates" if spec else Path()
    return {path.stem: path for path in folder.glob("*.jinja")} if spec else {}


PATHS = template_paths()
TEXT_TEMPLATES = sorted(name for name in PATHS if not name.endswith("_training") and name not in VISION)


def with_published_template(tokenizer, name, special_of=None):
    """Return a copy of a tokenizer with a published template, and the special tokens of it."""
    changed = copy.deepcopy(tokenizer)
    special = set(re.findall(SPECIAL, PATHS[special_of or name].read_text())) - {changed.eos_token}
    changed.add_special_tokens({"bos_token": "<s>", "additional_special_tokens": sorted(special)})
    changed.chat_template = PATHS[name].read_text()
    return changed


def with_template(tokenizer, template):
    """Return a copy of a tokenizer with another chat template."""
    changed = copy.deepcopy(tokenizer)
    changed.chat_template = template
    return changed
