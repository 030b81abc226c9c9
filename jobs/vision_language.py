"""A vision-language model in a loop of your own, where ranks have different numbers and kinds of microbatches.

    mpiexec -n 3 python jobs/vision_language.py [MODEL_DIR]     # by default a tiny Qwen2-VL, initialized at random

Rank 0 has a sequence with an image, rank 1 three texts, other ranks nothing; a single process has all four and prints
the same losses. The vision tower runs on rank 0 only. With collectives, it would wait for the other ranks without end.
"""

import sys

import torch
import transformers

import odc_mpi

SIZES = {"vocab_size": 128, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
SIZES |= {"bos_token_id": 100, "eos_token_id": 101}
SIZES |= {"num_attention_heads": 2, "num_key_value_heads": 1, "rope_parameters": {"mrope_section": [2, 3, 3]}}
VISION = {"depth": 2, "embed_dim": 32, "hidden_size": 32, "num_heads": 2, "patch_size": 4}
TOKENS = {"image_token_id": 120, "vision_start_token_id": 121, "vision_end_token_id": 122}


def build(path: str | None) -> torch.nn.Module:
    """Return the model in a directory, or a tiny one that is the same in every process."""
    if path:
        return transformers.AutoModelForImageTextToText.from_pretrained(path, dtype=torch.float32)
    torch.manual_seed(0)
    config = transformers.Qwen2VLConfig(text_config=SIZES, vision_config=VISION, **TOKENS)
    return transformers.Qwen2VLForConditionalGeneration(config)


def microbatches(config: transformers.PreTrainedConfig) -> list[dict[str, torch.Tensor]]:
    """Return a sequence with an image of 4 x 4 patches, and three texts."""
    torch.manual_seed(1)
    image, *texts = ({"input_ids": torch.randint(0, 100, (1, 9 + n))} for n in range(4))
    vision, tokens = config.vision_config, image["input_ids"]
    end = 2 + 16 // vision.spatial_merge_size**2
    tokens[0, 1], tokens[0, 2:end] = config.vision_start_token_id, config.image_token_id
    image["pixel_values"] = torch.randn(16, vision.in_channels * vision.temporal_patch_size * vision.patch_size**2)
    image |= {"image_grid_thw": torch.tensor([[1, 4, 4]]), "mm_token_type_ids": (tokens == config.image_token_id).int()}
    return [image, *texts]


def train(world: odc_mpi.World, path: str | None = None) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Take two steps, and return their losses and the full model. Collective."""
    module = build(path)
    model, losses = odc_mpi.shard_model(module, world), []
    optimizer = torch.optim.AdamW(model.shard_parameters(), lr=1e-3, eps=1e-3)
    everything = microbatches(module.config)
    num_tokens = sum(inputs["input_ids"].numel() - 1 for inputs in everything)
    mine = everything if world.size == 1 else {0: everything[:1], 1: everything[1:]}.get(world.rank, [])
    for _ in range(2):
        with model.minibatch("loss") as stats:  # no rank waits for another in here
            for inputs in mine:
                loss = model(**inputs, labels=inputs["input_ids"]).loss * (inputs["input_ids"].numel() - 1) / num_tokens
                loss.backward()  # gradients are summed over ranks: each loss has the weight of its share of the tokens
                stats.local["loss"] += loss.item()
        optimizer.step()
        model.publish()
        losses.append(stats.sum("loss"))
    state = model.state_dict()
    world.gather_objects(None)  # no rank frees its shards while another reads them
    model.close()
    return losses, state


if __name__ == "__main__":
    world = odc_mpi.World()
    losses, _ = train(world, *sys.argv[1:])
    if world.rank == 0:
        print(f"losses of {world.size} ranks: {losses}")
