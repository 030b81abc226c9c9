"""Inputs of data sets: chunks that HDF5 refuses, flipped bits, truncation.

Values that were not written, and what a data set cannot have, are refused one by one in tests/data/test_dataset.py.
"""

import os

import h5py
from case import Case, change, damaged_dataset, mutation, train

FAMILY, FLIPS = "c data sets", "c flipped bits"
NUM_FLIPS = 200
RIGHT = (0, 2)
_MAIN = ("tokens", "loss_mask", "offsets", "num_trained_tokens")
_EVAL = train("--data.eval_path", "eval.h5")


def cases(rng):
    yield Case(FAMILY, "undamaged", train(), codes=(0,), same=True)
    yield Case(FAMILY, "tokenizer missing", train(), _open(lambda file: file.pop("tokenizer")), RIGHT, same=True)
    for options in ({"compression": "gzip"}, {"fletcher32": True}):
        name, broken = f"chunk with {next(iter(options))} that is refused", _broken_chunk(options)
        yield Case(FAMILY, name, train(), _open(broken), RIGHT, same=True)
        yield Case(FAMILY, f"eval: {name}", _EVAL, _open(broken, "eval.h5"), RIGHT, same=True)
        argv = train("--data.balance", rng.choice(("lb_mini", "dynamic")))
        yield Case(FAMILY, f"{name}, two ranks", argv, _open(broken), RIGHT, same=True, ranks=2, limit_s=90)
    for tenth in range(10):
        truncate = lambda content, tenth=tenth: content[: len(content) * tenth // 10]  # noqa: E731
        yield Case(FAMILY, f"cut to {tenth} tenths", train(), change("data.h5", truncate), RIGHT, same=True)
    halves = {"first": lambda content: bytes(len(content) // 2) + content[len(content) // 2 :]}
    halves["second"] = lambda content: content[: len(content) // 2] + bytes(len(content) - len(content) // 2)
    for name, half in halves.items():
        yield Case(FAMILY, f"{name} half zero", train(), change("data.h5", half), RIGHT, same=True)
    for _ in range(40):
        name, apply = mutation(rng)
        yield Case(FAMILY, f"data.h5: {name}", train(), change("data.h5", apply), RIGHT, same=True)
    for name, make in {
        "a folder": os.mkdir,
        "a FIFO": os.mkfifo,
        "a loop": lambda path: path.symlink_to(path),
    }.items():
        damage = lambda directory, make=make: make(directory / "x.h5")  # noqa: E731
        yield Case(FAMILY, f"data.path is {name}", train("--data.path", "x.h5"), damage)
    for path in ("", "missing.h5", "notes.txt", "a.jsonl", "/dev/null", "/dev/zero", "model", "x" * 300, "\udcff"):
        yield Case(FAMILY, f"data.path {path[:40]!a}", train("--data.path", path))
    zones = (*_MAIN, "tokenizer", "anywhere", "anywhere", "anywhere")
    for number in range(NUM_FLIPS):
        zone, where, bit = zones[number % len(zones)], rng.random(), rng.randrange(8)
        yield Case(
            FLIPS, f"{zone} at {where:.5f}, bit {bit}", train(), damaged_dataset(zone, where, bit), RIGHT, same=True
        )


def _open(edit, name="data.h5"):
    def damage(directory):
        with h5py.File(directory / name, "r+", libver="latest") as file:
            edit(file)

    return damage


def _broken_chunk(options):
    def edit(file):
        values = file["tokens"][:]
        del file["tokens"]
        file.create_dataset("tokens", data=values, chunks=(64,), **options)
        item = file["tokens"]
        mask, chunk = item.id.read_direct_chunk((0,))
        item.id.write_direct_chunk((0,), bytes([chunk[0] ^ 255]) + chunk[1:], mask)

    return edit
