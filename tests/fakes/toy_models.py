"""Modules that several test modules train, and weights to load into them."""

import torch
import torch.nn.functional as F
from torch import nn

WIDTH, VOCABULARY = 8, 17
INPUT = torch.linspace(-1, 1, 2 * WIDTH, dtype=torch.float64).view(2, WIDTH)


class Block(nn.Module):
    """A transformer's block: attention and an MLP, with norms before them."""

    def __init__(self, width=WIDTH, heads=2):
        super().__init__()
        self.heads = heads
        self.norm1 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width, bias=False)
        self.norm2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    def forward(self, x):
        shape = (*x.shape[:2], self.heads, -1)
        q, k, v = (part.reshape(shape).transpose(1, 2) for part in self.qkv(self.norm1(x)).chunk(3, -1))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(x.shape))
        return x + self.mlp(self.norm2(x))


class Transformer(nn.Module):
    """Embedding, blocks, head; the head may share the embedding's weight."""

    _no_split_modules = ("Block", "NotInThisModel")

    def __init__(self, num_blocks=2, tied=False):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(num_blocks))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, tokens):
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class Layer(nn.Module):
    """The smallest unit that is not a bare Linear."""

    def __init__(self, width=WIDTH):
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x):
        return torch.tanh(self.linear(x))


class Stack(nn.Module):
    """Layers one after the other, between two of the root."""

    def __init__(self, num_layers=3, width=WIDTH):
        super().__init__()
        self.first = nn.Linear(width, width)
        self.layers = nn.ModuleList(Layer(width) for _ in range(num_layers))
        self.last = nn.Linear(width, width)

    def forward(self, x):
        x = self.first(x)
        for layer in self.layers:
            x = layer(x)
        return self.last(x)


class RandomWeights:
    """Weights of these shapes by name, all of fp32; notes what is read."""

    def __init__(self, shapes):
        generator = torch.Generator().manual_seed(3)
        self.values = {
            name: torch.randn(tuple(shape), generator=generator, dtype=torch.float32) for name, shape in shapes.items()
        }
        self.reads = []

    def read(self, name, start, stop):
        self.reads.append((name, start, stop))
        return self.values[name].flatten()[start:stop]
