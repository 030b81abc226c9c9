"""Files of users go on loading: a data set and a run that were kept, against the code as it is now.

Through the command line and the public names only, as modules may move. README.md says how the files were made.
"""

import functools
import json
import math
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import h5py
import numpy as np
import pytest
import yaml

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
EXPECTED = json.loads((HERE / "expected.json").read_text())
CHECKPOINT = Path("run", "checkpoints", "step_00000005")
#: Of losses and norms: other processors multiply in another order.
TOLERANCE = 1e-5
DEADLINE_S = 90


@pytest.fixture
def kept(tmp_path):
    """A copy of what is kept, in which relative paths are right."""
    return copied(tmp_path)


def copied(folder, *parts):
    shutil.copy(HERE / "run.yaml", folder)
    for part in parts or ("data", "run"):
        shutil.copytree(HERE / part, folder / part)
    return folder


def start(folder, *arguments):
    launched = ("PMI", "PMIX", "OMPI_COMM", "PYTEST")
    env = {name: value for name, value in os.environ.items() if not name.startswith(launched)}
    env |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "ODC_MPI_PROGRESS": "plain", "PYTHONPATH": str(ROOT)}
    # Open MPI starts on one rank without mpiexec too, and refuses root unless told.
    env |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1", "OMPI_MCA_osc": "^ucx"}
    return subprocess.Popen(
        [sys.executable, "-m", "odc_mpi", *map(str, arguments)],
        cwd=folder,
        env=env,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def wait(process):
    try:
        return process.communicate(timeout=DEADLINE_S)
    finally:
        if process.poll() is None:
            process.kill()
            process.communicate()


def succeeded(process, out, err):
    assert process.returncode == 0, f"exit code {process.returncode}\n{out}\n{err}"
    return out


def odc_mpi_command(folder, *arguments):
    process = start(folder, *arguments)
    return succeeded(process, *wait(process))


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Returns the folder of a run on one rank, and what it said: from the start, or gone on. They run side by side."""
    folders = {name: tmp_path_factory.mktemp(name) for name in ("start", "resumed")}
    copied(folders["start"], "data")
    copied(folders["resumed"])
    configurations = {"start": "run.yaml", "resumed": "run/config.yaml"}
    processes = {name: start(folders[name], "train", "--config", path) for name, path in configurations.items()}
    outputs = functools.cache(lambda name: wait(processes[name]))
    # One that fails is of no harm to the tests of the other.
    yield lambda name: (folders[name], succeeded(processes[name], *outputs(name)))
    for process in processes.values():
        if process.poll() is None:
            process.kill()
        if not process.stdout.closed:
            process.communicate()


def steps_of(folder):
    return [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]


def assert_steps(lines, expected):
    assert [line["step"] for line in lines] == [step for step, _, _ in expected]
    for line, (step, loss, norm) in zip(lines, expected, strict=True):
        assert math.isclose(line["loss"], loss, rel_tol=TOLERANCE), f"step {step}: {line['loss']!r}, was {loss!r}"
        assert math.isclose(line["grad_norm"], norm, rel_tol=TOLERANCE), f"step {step}: {line['grad_norm']!r}"


def examples():
    return [json.loads(line) for line in (HERE / "data" / "examples.jsonl").read_text("utf-8").splitlines()]


def test_the_data_set(kept):
    import odc_mpi

    path = kept / "data" / "examples.h5"
    with h5py.File(path, locking=False) as file:
        tokens, mask, offsets = file["tokens"][:], file["loss_mask"][:], file["offsets"][:]
    expected = EXPECTED["dataset"]
    with odc_mpi.Dataset(path) as dataset:
        assert Path(dataset.path) == path and len(dataset) == len(examples())
        for name in ("lengths", "num_trained_tokens"):
            assert getattr(dataset, name).tolist() == expected[name]
        for name in ("vocab_size", "max_token_id", "vocabulary"):
            assert getattr(dataset, name) == expected[name]
        assert dataset.digest() == expected["digest"]  # by which checkpoints know their data
        for i, begin in enumerate(offsets[:-1]):
            own_tokens, own_mask = dataset[i]
            np.testing.assert_array_equal(own_tokens, tokens[begin : offsets[i + 1]])
            np.testing.assert_array_equal(own_mask, mask[begin : offsets[i + 1]] == 1)


def test_the_tokenizer_and_what_is_trained(kept):
    from tokenizers import Tokenizer

    import odc_mpi

    tokenizer = Tokenizer.from_file(str(kept / "data" / "examples.tokenizer" / "tokenizer.json"))
    kinds = set()
    with odc_mpi.Dataset(kept / "data" / "examples.h5") as dataset:
        assert tokenizer.get_vocab_size() == dataset.vocab_size
        for i, example in enumerate(examples()):
            tokens, mask = dataset[i]
            found = [tokenizer.decode(ids.tolist(), skip_special_tokens=False) for ids in (tokens, tokens[mask])]
            if "messages" in example:
                said = [(message["role"], f"{message['content']}<|im_end|>\n") for message in example["messages"]]
                text = "".join(f"<|im_start|>{role}\n{words}" for role, words in said)
                trained = "".join(words.rstrip("\n") for role, words in said if role == "assistant")
                found[1] = found[1].replace("\n", "")
            else:
                trained = example.get("completion", example.get("text")) + "<|endoftext|>"
                text = example.get("prompt", "") + trained
            assert found == [text, trained]
            kinds |= example.keys()
    assert kinds == {"messages", "prompt", "completion", "text"}


def test_the_same_text_becomes_the_same_data_set(tmp_path):
    import odc_mpi

    kept = copied(tmp_path, "data")
    prepare = ("prepare", "data/examples.jsonl", "again.h5", "--tokenizer", "data/examples.tokenizer")
    odc_mpi_command(kept, *prepare)
    with odc_mpi.Dataset(kept / "again.h5") as dataset:
        assert dataset.digest() == EXPECTED["dataset"]["digest"]
    with (
        h5py.File(kept / "again.h5", locking=False) as new,
        h5py.File(HERE / "data" / "examples.h5", locking=False) as old,
    ):
        assert new.keys() >= old.keys() and dict(new.attrs).keys() >= dict(old.attrs).keys()
        for name in old:
            np.testing.assert_array_equal(new[name][:], old[name][:])


@pytest.mark.parametrize("place", [Path("run"), CHECKPOINT], ids=str)
def test_the_checkpoint_is_intact(kept, place):
    assert "intact" in odc_mpi_command(kept, "checkpoint", "verify", place)


def test_the_checkpoint_is_listed_and_shown(kept):
    listed = odc_mpi_command(kept, "checkpoint", "list", "run").splitlines()
    assert len(listed) == 1 and str(CHECKPOINT) in listed[0] and "step 5" in listed[0]
    shown = odc_mpi_command(kept, "checkpoint", "show", "run")
    names = tensors_of(CHECKPOINT)
    assert len(names) > 50 and [name for name in names if name not in shown] == []


def tensors_of(directory):
    """All tensors of the kept checkpoint, as plain h5py reads them."""
    found = {}
    with h5py.File(HERE / directory / "index.h5", "r", locking=False) as file:
        file.visititems(lambda name, item: found.update({name: item[:]} if isinstance(item, h5py.Dataset) else {}))
    return found


def test_the_checkpoint_becomes_a_model(kept):
    from safetensors.numpy import load_file

    odc_mpi_command(kept, "checkpoint", "export", "run", "model")
    stored = {
        name.removeprefix("model/"): values
        for name, values in tensors_of(CHECKPOINT).items()
        if name.startswith("model/")
    }
    exported = load_file(kept / "model" / "model.safetensors")
    assert exported.keys() == stored.keys()
    for name, values in stored.items():
        assert np.isfinite(values).all()
        np.testing.assert_array_equal(exported[name], values)
    config = json.loads((kept / "model" / "config.json").read_text())
    wanted = yaml.safe_load((HERE / "run.yaml").read_text())["model"]["config"]
    assert config["architectures"] == ["Qwen2ForCausalLM"] and wanted.items() <= config.items()
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        assert (kept / "model" / name).read_bytes() == (HERE / "data" / "examples.tokenizer" / name).read_bytes()


def test_a_run_from_the_start_is_the_one_of_then(trained):
    assert_steps(steps_of(trained("start")[0]), EXPECTED["start"])


def test_a_run_goes_on_on_another_number_of_ranks(trained):
    folder, said = trained("resumed")
    assert "resuming after step 5" in said and "saved by 2 ranks" in said and "changed since" not in said
    lines = steps_of(folder)
    assert lines[:5] == steps_of(HERE)[:5]  # to the last digit: they are records
    assert_steps(lines[5:], EXPECTED["resumed"][5:])
    kept = [[line[name] for name in ("step", "loss", "grad_norm")] for line in steps_of(HERE)]
    assert_steps(lines, kept)  # which that run would have done itself, on its two ranks
    summary = json.loads((folder / "run" / "summary.json").read_text())
    assert (summary["steps"], summary["skipped_steps"], summary["world_size"]) == (10, 0, 1)


def keys_of(value, path=""):
    """All keys of nested objects, those of the things in a list under one name."""
    if isinstance(value, dict):
        inner = (keys_of(entry, f"{path}.{name}") | {f"{path}.{name}"} for name, entry in value.items())
    else:
        inner = (keys_of(entry, f"{path}[]") for entry in value) if isinstance(value, list) else ()
    return set().union(*inner)


@pytest.mark.parametrize("run", ["start", "resumed"])
@pytest.mark.parametrize("name", ["summary.json", "metrics.jsonl", "trace.json", "manifest.json"])
def test_records_have_all_that_they_had(trained, run, name):
    def keys(folder):
        """Of each object in the newest file of that name."""
        path = max(folder.glob(f"run/checkpoints/*/{name}")) if name == "manifest.json" else folder / "run" / name
        text = re.sub(r"step_\d+_rank_\d+", "shard", path.read_text())
        found = [keys_of(json.loads(line)) for line in (text.splitlines() if name == "metrics.jsonl" else [text])]
        # What a configuration of transformers holds is for another project to say.
        return [{key for key in one if not key.startswith(".about.transformers_config.")} for one in found]

    old = set().union(*keys(HERE))
    assert len(old) > 10
    for new in keys(trained(run)[0]):
        assert old - new == set()


def test_a_run_directory_has_all_that_it_had(trained):
    def names(folder):
        return {str(path.relative_to(folder)) for path in (folder / "run").rglob("*")}

    second = CHECKPOINT / "step_00000005_rank_00001.h5"  # this run has one rank
    assert names(HERE) - names(trained("start")[0]) == {str(second)}


def test_the_report_of_a_run(kept):
    odc_mpi_command(kept, "report", "run")
    page = (kept / "run" / "report.html").read_text()
    assert "<svg" in page and "4.71" in page  # the last loss
