"""Measure peak memory and time of the loss of a model with a large vocabulary, forward and backward, on a CPU.

    python benchmarks/loss_memory.py [--tokens 4096] [--vocabulary 152064] [--trained 1.0] [--repeats 5]

Compares all logits at once (transformers), the fused head of TRL, and `TokenLogps`, each in a process of its own.
"""

import argparse
import resource
import subprocess
import sys
from pathlib import Path
from statistics import median
from time import perf_counter

CONTENDERS = ("transformers", "trl", "odc_mpi")


def peak_mib() -> float:
    """Return the largest resident memory of this process so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def measure(name: str, options: argparse.Namespace) -> None:
    """Run one contender and print the memory that it added, the median time, and the loss."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    from odc_mpi.models.logps.token_logps import TokenLogps

    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    sizes = {"hidden_size": options.hidden, "intermediate_size": 2 * options.hidden, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": options.vocabulary}
    model = Qwen2ForCausalLM(Qwen2Config(**sizes, **heads, tie_word_embeddings=True))
    tokens = torch.randint(options.vocabulary, (1, options.tokens))
    labels = tokens.clone()
    labels[0, torch.rand(options.tokens) >= options.trained] = -100
    positions = (labels[0, 1:] != -100).nonzero()[:, 0]
    if name == "trl":
        from trl.trainer.utils import add_fused_lm_head

        add_fused_lm_head(model, outputs=("log_probs", "entropy", "is_top1"))
    token_logps = TokenLogps(model) if name == "odc_mpi" else None
    for parameter in model.parameters():  # allocated before, as in a run
        parameter.grad = torch.zeros_like(parameter)

    def loss() -> torch.Tensor:
        inputs = {"input_ids": tokens, "use_cache": False}
        if token_logps:
            return -token_logps(inputs, positions, tokens[0, positions + 1]).logps.mean()
        more = {"fused_lm_head": True} if name == "trl" else {}
        return model(**inputs, labels=labels, **more).loss

    before, seconds = peak_mib(), []
    for _ in range(options.repeats):
        began = perf_counter()
        value = loss()
        value.backward()
        seconds.append(perf_counter() - began)
    print(f"{name:14}{peak_mib() - before:10,.0f} MiB{median(seconds):10.2f} s    loss {value.item():.7f}", flush=True)


def main() -> None:
    """Measure all contenders in turn."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("tokens", 4096), ("vocabulary", 152_064), ("hidden", 512), ("repeats", 5), ("threads", 2)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--trained", type=float, default=1.0, help="part of the tokens that have a loss")
    parser.add_argument("--only", choices=CONTENDERS)
    options = parser.parse_args()
    if options.only:
        measure(options.only, options)
        return
    for name in CONTENDERS:
        subprocess.run([sys.executable, Path(__file__), *sys.argv[1:], "--only", name], check=True, timeout=900)


if __name__ == "__main__":
    main()
