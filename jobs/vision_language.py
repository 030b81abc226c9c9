"""A vision-language model in a loop of one's own, where ranks have different numbers and kinds of microbatches.

    mpiexec -n 3 python jobs/vision_language.py                # a tiny Qwen2-VL, initialized at random
    mpiexec -n 3 python jobs/vision_language.py MODEL_DIR      # such as a copy of Qwen/Qwen2-VL-2B-Instruct

Rank 0 has a sequence with an image, rank 1 three microbatches of text alone, all others none. Thus the vision tower
runs on rank 0 only. With collectives, other ranks would wait for it without end; here no rank waits for another before
the end of the minibatch. On one process, the same program runs all microbatches, and prints the same loss.
"""

import sys

import torch
import transformers

import odc_mpi

TINY = {
    "text_config": {
        "vocab_size": 128,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "rope_parameters": {"rope_type": "default", "mrope_section": [2, 3, 3]},
    },
    "vision_config": {"depth": 2, "embed_dim": 32, "hidden_size": 32, "num_heads": 2, "patch_size": 4, "mlp_ratio": 2},
    "image_token_id": 120,
    "vision_start_token_id": 121,
    "vision_end_token_id": 122,
}


def build(path: str | None) -> torch.nn.Module:
    """Return the model in a directory, or a tiny one that is the same in every process."""
    if path:
        return transformers.AutoModelForImageTextToText.from_pretrained(path, dtype=torch.float32)
    torch.manual_seed(0)
    config = transformers.Qwen2VLConfig(**TINY)
    return transformers.Qwen2VLForConditionalGeneration(config)


def microbatches(config: transformers.PreTrainedConfig, rank: int, size: int) -> list[dict[str, torch.Tensor]]:
    """Return the inputs of a rank: an image, or three texts, or none. A single process has them all."""
    random = torch.Generator().manual_seed(1)
    texts = [{"input_ids": torch.randint(0, 100, (1, 6 + n), generator=random)} for n in range(3)]
    vision = config.vision_config
    patches, merged = 16, 16 // vision.spatial_merge_size**2  # one image of 4 x 4 patches
    tokens = torch.randint(0, 100, (1, 5 + merged), generator=random)
    tokens[0, 1], tokens[0, 2 : 2 + merged] = config.vision_start_token_id, config.image_token_id
    width = vision.in_channels * vision.temporal_patch_size * vision.patch_size**2
    image = {
        "input_ids": tokens,
        "mm_token_type_ids": (tokens == config.image_token_id).int(),
        "pixel_values": torch.randn(patches, width, generator=random),
        "image_grid_thw": torch.tensor([[1, 4, 4]]),
    }
    by_rank = [[image], texts] if size > 1 else [[image, *texts]]
    return by_rank[rank] if rank < len(by_rank) else []


def train(world: odc_mpi.World, path: str | None = None) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Take two steps, and return their losses and the full model. Collective."""
    module = build(path)
    model = odc_mpi.shard_model(module, world)
    optimizer = torch.optim.AdamW(model.shard_parameters(), lr=1e-3, eps=1e-3)
    everything = [each for rank in range(world.size) for each in microbatches(module.config, rank, world.size)]
    num_tokens = sum(each["input_ids"].numel() - 1 for each in everything)
    losses = []
    for _ in range(2):
        with model.minibatch("loss") as stats:  # no rank waits for another in here
            for inputs in microbatches(module.config, world.rank, world.size):
                # Gradients are summed over all ranks, so each loss is weighted by its share of the tokens.
                loss = model(**inputs, labels=inputs["input_ids"]).loss * (inputs["input_ids"].numel() - 1) / num_tokens
                loss.backward()
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
