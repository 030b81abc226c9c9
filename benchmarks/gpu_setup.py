"""Model, tokenizer, sizes and device of `gpu_models.py`."""

import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
import transformers
from gpu_step import Contenders
from tokenizers import Tokenizer, models, pre_tokenizers

from odc_mpi.comm.device.device import Device, find_device
from odc_mpi.runtime.world import World
from odc_mpi.training.settings import Config, DataConfig, ModelConfig, OptimConfig, RunConfig

ODC, TRANSFORMERS = "odc_mpi", "transformers"
SMOLLM2 = {
    "model_type": "llama",
    "vocab_size": 49152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "head_dim": 64,
    "max_position_embeddings": 8192,
    "rope_parameters": {"rope_type": "default", "rope_theta": 100_000.0},
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
    # With transformers' 0.02 the layers hardly count, and a token is followed by itself.
    "initializer_range": 1 / 24,
}
TINY = {"vocab_size": 512, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 2}
TINY |= {"num_key_value_heads": 1, "head_dim": 32, "initializer_range": 1 / 8}


@dataclass(frozen=True)
class Sizes:
    """Numbers of prompts, tokens and sequences."""

    prompts: int = 32
    new_tokens: int = 128
    sequences: int = 32
    median_length: int = 300
    max_length: int = 2048
    max_tokens: int = 8192
    groups: int = 8
    num_generations: int = 8


TINY_SIZES = Sizes(4, 6, 12, 12, 64, 128, 2, 4)


class HostDevice:
    """Stands in for a GPU where the script is checked without one."""

    torch_device = torch.device("cpu")
    name = "host"

    def empty_for_windows(self, num_bytes: int) -> torch.Tensor:
        """Return memory, `[num_bytes]` uint8."""
        return torch.empty(num_bytes, dtype=torch.uint8)

    def record_event(self) -> "HostDevice":
        """Return an event, which has happened."""
        return self

    def synchronize(self) -> None:
        """Wait for nothing."""


@dataclass(frozen=True)
class Setup:
    """What all parts share.

    Attributes:
        kind: Device of the models: cuda or cpu.
        folder: Temporary directory.
        model: Directory of the model, without a tokenizer.
        tokenizer: Directory of the tokenizer.
    """

    world: World
    device: Device
    kind: str
    folder: Path
    model: Path
    tokenizer: Path
    vocab_size: int
    sizes: Sizes
    steps: int
    repeats: int
    report: Callable[[str], None]

    def config(
        self, data: Path, sequences: int, objective: str = "sft", learning_rate: float = 1e-6, **sections: Any
    ) -> Config:
        """Return a configuration of `odc-mpi train` with this number of sequences per minibatch."""
        kind = cast(Any, self.kind)
        return Config(
            model=ModelConfig(path=str(self.model), param_dtype="bfloat16", gradient_checkpointing=False),
            data=DataConfig(str(data), minibatch_sequences=sequences, max_tokens_per_microbatch=self.sizes.max_tokens),
            optim=OptimConfig(learning_rate=learning_rate, lr_scheduler_type="constant", device=kind),
            run=RunConfig(objective=cast(Any, objective), dir=str(self.folder / "run"), device=kind),
            **sections,
        )

    def contenders(self, part: str) -> Contenders:
        """Return contenders to compare with transformers."""
        return Contenders(self.world, self.device, lambda line: self.report(f"{part}, {line}"), TRANSFORMERS)

    def finish(self) -> None:
        """Wait for the GPU."""
        self.device.record_event().synchronize()


@contextmanager
def prepare(
    world: World, model: Path | None, kind: str, steps: int, repeats: int, report: Callable[[str], None], *, tiny: bool
) -> Iterator[Setup]:
    """Write a model with random weights, or link the files of `model`, in a temporary directory."""
    device = find_device(kind, world.host_rank)
    with tempfile.TemporaryDirectory(prefix="odc_mpi-bench-") as name:
        folder = Path(name)
        model_dir, tokenizer = folder / "model", model or folder / "tokenizer"
        if model is None:
            report("writing a model with random weights")
            config = transformers.AutoConfig.for_model(**SMOLLM2 | (TINY if tiny else {}))
            torch.manual_seed(0)
            transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(model_dir)
            words = Tokenizer(models.WordLevel({str(i): i for i in range(config.vocab_size)}, unk_token="0"))
            words.pre_tokenizer = pre_tokenizers.Whitespace()
            transformers.PreTrainedTokenizerFast(tokenizer_object=words, eos_token="0").save_pretrained(tokenizer)
        else:
            model_dir.mkdir()
            for file in [model / "config.json", *model.glob("*.safetensors*")]:
                (model_dir / file.name).symlink_to(file.resolve())
            config = transformers.AutoConfig.from_pretrained(model_dir)
        yield Setup(
            world,
            device or cast(Device, HostDevice()),
            kind,
            folder,
            model_dir,
            tokenizer,
            config.vocab_size,
            TINY_SIZES if tiny else Sizes(),
            steps,
            repeats,
            report,
        )
