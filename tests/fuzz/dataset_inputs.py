"""Inputs of data sets: HDF5 objects that do not fit together, flipped bits, truncation, storage outside the file."""

import os

import h5py
import numpy as np
from case import Case, change, damaged_dataset, mutation, train

FAMILY, FLIPS = "c data sets", "c flipped bits"
NUM_FLIPS = 200
RIGHT = (0, 2)
_MAIN = ("tokens", "loss_mask", "offsets", "num_trained_tokens")
_EVAL = train("--data.eval_path", "eval.h5")
_TYPES = ("<f8", "<u8", "u1", "<f2")
ATTRIBUTES = ("format", "version", "vocab_size", "max_token_id", "vocabulary", "content", "report", "request")
VALUES = {
    "array": np.arange(3),
    "text": "many",
    "nan": np.nan,
    "negative": -1,
    "huge": 2**63 - 1,
    "empty": h5py.Empty("f4"),
    "missing": None,
}


def cases(rng):
    yield Case(FAMILY, "undamaged", train(), codes=(0,), same=True)
    for name, edit in _edits().items():
        yield Case(FAMILY, name, train(), _open(edit), RIGHT, same=True)
        if name.startswith(("tokens", "mask", "virtual", "chunk")):
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


def _put(name, value):
    """Put something else in the place of an object: a link, a value, or nothing."""

    def edit(file):
        del file[name]
        if value is not None:
            file[name] = value

    return edit


def _virtual(name):
    def edit(file):
        layout = h5py.VirtualLayout(file[name].shape, file[name].dtype)
        layout[:] = h5py.VirtualSource("missing.h5", name, file[name].shape)
        del file[name]
        file.create_virtual_dataset(name, layout)

    return edit


def _attribute(name, value):
    return lambda file: file.attrs.pop(name, None) if value is None else file.attrs.create(name, value)


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
    edits = {
        "tokens zero": _set("tokens", np.zeros_like),
        "tokens reversed": _set("tokens", lambda values: values[::-1]),
        "tokens beyond max_token_id": _set("tokens", _one(319)),
        "tokens beyond the vocabulary": _set("tokens", _one(100_000)),
        "tokens of 2**32 - 1": _set("tokens", _one(2**32 - 1)),
        "tokens never written": _replace("tokens", chunks=(64,)),
        "mask zero": _set("loss_mask", np.zeros_like),
        "mask one": _set("loss_mask", np.ones_like),
        "mask two": _set("loss_mask", lambda values: values * 2),
        "counts too high": _set("num_trained_tokens", lambda values: values + 1),
        "counts too low": _set("num_trained_tokens", np.ones_like),
        "counts zero": _set("num_trained_tokens", np.zeros_like),
        "counts negative": _set("num_trained_tokens", np.negative),
        "offsets moved": _set("offsets", lambda values: values + (values > 0) * (values < values[-1])),
        "offsets reversed": _set("offsets", lambda values: values[::-1]),
        "offsets negative": _set("offsets", np.negative),
        "offsets equal": _set("offsets", _one(0)),
        "max_token_id lower": _attribute("max_token_id", 5),
        "chunk that gzip refuses": _broken_chunk(compression="gzip"),
        "chunk that Fletcher-32 refuses": _broken_chunk(fletcher32=True),
        "tokens in a raw file that is missing": _replace("tokens", external=[("missing.raw", 0, h5py.h5f.UNLIMITED)]),
        "everything of 2**42": _huge,
        "soft link to itself": _put("tokens", h5py.SoftLink("/tokens")),
        "tokenizer missing": _put("tokenizer", None),
        "tokenizer a number": _put("tokenizer", 1),
        "an additional dataset": lambda file: file.__setitem__("mine", 1),
        "tokens and mask exchanged": _exchange,
    }
    for name in _MAIN:
        edits |= {
            f"{name} missing": _put(name, None),
            f"{name} a group": lambda file, name=name: (file.pop(name), file.create_group(name)),
            f"{name} empty": _replace(name, shape=(0,)),
            f"{name} of another size": _replace(name, shape=(7,)),
            f"{name} a scalar": _replace(name, shape=()),
            f"{name} with two dimensions": _replace(name, shape=(3, 3)),
            f"{name} without a shape": _put(name, h5py.Empty("f4")),
            f"{name} an external link": _put(name, h5py.ExternalLink("eval.h5", name)),
            f"{name} a soft link": _put(name, h5py.SoftLink("/nowhere")),
            f"virtual {name}": _virtual(name),
            **{f"{name} of type {dtype}": _replace(name, dtype=dtype) for dtype in _TYPES},
        }
    for name in ATTRIBUTES:
        edits |= {f"attribute {name} {kind}": _attribute(name, value) for kind, value in VALUES.items()}
    return edits
