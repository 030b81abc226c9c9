"""Inputs of data sets: other values than those that were written, flipped bits, truncation.

Objects and attributes that a data set cannot have are refused one by one in tests/data/test_dataset.py.
"""

import os

import h5py
import numpy as np
from case import Case, change, damaged_dataset, mutation, train

FAMILY, FLIPS = "c data sets", "c flipped bits"
NUM_FLIPS = 200
RIGHT = (0, 2)
_MAIN = ("tokens", "loss_mask", "offsets", "num_trained_tokens")
_EVAL = train("--data.eval_path", "eval.h5")


def cases(rng):
    yield Case(FAMILY, "undamaged", train(), codes=(0,), same=True)
    for name, edit in _edits().items():
        yield Case(FAMILY, name, train(), _open(edit), RIGHT, same=True)
        if name.startswith(("tokens", "mask", "chunk")):
            yield Case(FAMILY, f"eval: {name}", _EVAL, _open(edit, "eval.h5"), RIGHT, same=True)
    for name in ("mask zero", "tokens beyond the vocabulary", "chunk that Fletcher-32 refuses", "tokens zero"):
        argv = train("--data.balance", rng.choice(("lb_mini", "dynamic")))
        yield Case(FAMILY, f"{name}, two ranks", argv, _open(_edits()[name]), RIGHT, same=True, ranks=2, limit_s=90)
    for tenth in range(10):
        cut = lambda content, tenth=tenth: content[: len(content) * tenth // 10]  # noqa: E731
        yield Case(FAMILY, f"cut to {tenth} tenths", train(), change("data.h5", cut), RIGHT, same=True)
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


def _replace(name, **options):
    def edit(file):
        values = file[name][:]
        del file[name]
        options.setdefault("shape", values.shape)
        options.setdefault("dtype", values.dtype)
        file.create_dataset(name, **options)

    return edit


def _set(name, function):
    def edit(file):
        values = file[name][:]
        file[name][:] = function(values)

    return edit


def _broken_chunk(**options):
    def edit(file):
        values = file["tokens"][:]
        del file["tokens"]
        file.create_dataset("tokens", data=values, chunks=(64,), **options)
        item = file["tokens"]
        mask, chunk = item.id.read_direct_chunk((0,))
        item.id.write_direct_chunk((0,), bytes([chunk[0] ^ 255]) + chunk[1:], mask)

    return edit


def _one(value):
    return lambda values: np.where(np.arange(len(values)) == len(values) // 2, value, values)


def _exchange(file):
    for name, other in (("tokens", "x"), ("loss_mask", "tokens"), ("x", "loss_mask")):
        file.move(name, other)


def _huge(file):
    for name in _MAIN:
        _replace(name, shape=(2**42 + (name == "offsets"),), chunks=(64,))(file)


def _edits():
    return {
        "tokens zero": _set("tokens", np.zeros_like),
        "tokens reversed": _set("tokens", lambda values: values[::-1]),
        "tokens beyond max_token_id": _set("tokens", _one(319)),
        "tokens beyond the vocabulary": _set("tokens", _one(100_000)),
        "tokens never written": _replace("tokens", chunks=(64,)),
        "tokens and mask exchanged": _exchange,
        "mask zero": _set("loss_mask", np.zeros_like),
        "mask one": _set("loss_mask", np.ones_like),
        "counts too high": _set("num_trained_tokens", lambda values: values + 1),
        "offsets moved": _set("offsets", lambda values: values + (values > 0) * (values < values[-1])),
        "max_token_id lower": lambda file: file.attrs.create("max_token_id", 5),
        "chunk that gzip refuses": _broken_chunk(compression="gzip"),
        "chunk that Fletcher-32 refuses": _broken_chunk(fletcher32=True),
        "everything of 2**42": _huge,
        "tokenizer missing": lambda file: file.pop("tokenizer"),
    }
