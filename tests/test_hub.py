"""Models by their names on the hub: in a cache laid out as huggingface_hub does, and without a network."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from user_errors import refused

from odc_mpi import hub

ROOT = Path(__file__).parents[1]
COMMIT = "0123456789abcdef0123456789abcdef01234567"
FILES = ("config.json", "model.safetensors", "tokenizer.json")


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    return tmp_path


def store(cache, name="Owner/Name-1.5", files=FILES, index=None):
    """As a download leaves it: contents in blobs, and links to them in the snapshot of the commit in refs."""
    repository = cache / f"models--{name.replace('/', '--')}"
    snapshot = repository / "snapshots" / COMMIT
    for folder in (repository / "blobs", repository / "refs", snapshot):
        folder.mkdir(parents=True)
    (repository / "refs" / "main").write_text(COMMIT)
    for file in files:
        (repository / "blobs" / file).write_text(index if index and file.endswith(".index.json") else "{}")
        (snapshot / file).symlink_to(Path("..", "..", "blobs", file))
    return snapshot


@pytest.mark.parametrize("name", ["Owner/Name-1.5", "gpt2"])
def test_a_name_in_the_cache(cache, name):
    snapshot = store(cache, name)
    assert hub.resolve_model_path(name, "model.path") == hub.cached_model_path(name) == str(snapshot)
    elsewhere = f"/home/somebody/hub/{snapshot.relative_to(cache)}"
    assert hub.cached_model_path(elsewhere) == str(snapshot) and hub.parse_name(elsewhere) == (name, COMMIT)


def test_a_revision_in_the_cache(cache, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    snapshot = store(cache)
    (snapshot.parents[1] / "refs" / "main").write_text("f" * 40)
    (snapshot.parents[1] / "refs" / "v1").write_text(COMMIT)
    for revision in (COMMIT, "v1"):
        assert hub.resolve_model_path(f"Owner/Name-1.5@{revision}", "model.path") == str(snapshot)
    refused("hf download Owner/Name-1.5 --revision v2", hub.resolve_model_path, "Owner/Name-1.5@v2", "model.path")
    assert hub.cached_model_path("Owner/Name-1.5") == "Owner/Name-1.5"
    Path("Owner/Name@x").mkdir(parents=True)
    assert hub.parse_name("Owner/Name@x") is None


def test_what_is_no_name_stays(cache, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    store(cache)
    Path("Owner/Name-1.5").mkdir(parents=True)
    for path in ("Owner/Name-1.5", "data.h5", "a/b/c", "./model", "/no/where"):
        assert hub.resolve_model_path(path, "model.path") == path


INDEX = '{"weight_map": {"x": "a.safetensors", "y": "b.safetensors"}}'


@pytest.mark.parametrize(
    ("files", "index", "weights"),
    [
        (("config.json", "tokenizer.json"), None, True),
        (("config.json", "model.safetensors"), None, False),
        (("config.json", "model.safetensors.index.json", "a.safetensors"), INDEX, True),
    ],
)
def test_an_incomplete_snapshot_is_not_used(cache, files, index, weights):
    snapshot = store(cache, files=files, index=index)
    words = "model.path: ...'Owner/Name-1.5'...HF_HUB_OFFLINE...hf download Owner/Name-1.5"
    refused(words, hub.resolve_model_path, "Owner/Name-1.5", "model.path", weights=weights)
    for file in ("b.safetensors", "model.safetensors", "tokenizer.json"):
        (snapshot / file).write_text("")
    assert hub.resolve_model_path("Owner/Name-1.5", "model.path", weights=weights) == str(snapshot)


@pytest.mark.parametrize(
    ("settings", "within"),
    [
        ({"HF_HUB_OFFLINE": "1"}, []),
        ({"HF_ENDPOINT": "http://127.0.0.1:9"}, []),
        # No interface and no route, as on the nodes of many clusters.
        pytest.param({}, ["unshare", "--net"], marks=pytest.mark.skipif(os.geteuid() != 0, reason="needs root")),
    ],
)
def test_without_a_network_the_line_comes_at_once(tmp_path, settings, within):
    words = [
        *within,
        sys.executable,
        "-m",
        "odc_mpi",
        "prepare",
        "stdlib",
        "--out",
        "x.h5",
        "--tokenizer",
        "Owner/Name",
    ]
    began = time.monotonic()
    environment = {**os.environ, "HF_HUB_OFFLINE": "0", "HF_HOME": str(tmp_path), "PYTHONPATH": str(ROOT), **settings}
    found = subprocess.run(words, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60)
    assert found.returncode == 2 and time.monotonic() - began < 30
    assert found.stderr.splitlines()[-1].endswith("correct it, or run hf download Owner/Name")
    assert "--tokenizer" in found.stderr and len(found.stderr.splitlines()) <= 2


@pytest.mark.usefixtures("cache")
def test_a_download_that_stalls_is_ended_and_ranks_poll_until_then(monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr(hub, "_PROGRAM", "import time; time.sleep(60)")
    monkeypatch.setattr(hub, "STALL_S", 1)
    lines, gathered = [], []
    options = {"gather": lambda value: gathered.append(value) or [value], "report": lines.append}
    refused("no bytes arrived for 1 s", hub.resolve_model_path, "Owner/Name", "model.path", **options)
    assert lines == ["downloading Owner/Name from the Hugging Face Hub"] and gathered.count(False) >= 2


def test_a_download_ends_with_its_process(tmp_path):
    child = hub._PROGRAM.partition("from huggingface_hub")[0]
    child += "import os, pathlib, time\npathlib.Path(json.loads(sys.argv[1])['repo_id']).write_text(str(os.getpid()))\n"
    program = f"""
from odc_mpi import hub
hub._PROGRAM = {child + "time.sleep(60)"!r}
hub._find = lambda path, weights: None
hub.resolve_model_path("pid", "model.path")
"""
    environment = {**os.environ, "HF_HUB_OFFLINE": "0", "HF_HOME": str(tmp_path), "PYTHONPATH": str(ROOT)}
    parent = subprocess.Popen([sys.executable, "-c", program], cwd=tmp_path, env=environment)
    pid = wait_for(lambda: int((tmp_path / "pid").read_text()))
    parent.kill()
    parent.wait()
    wait_for(lambda: "gone" if not Path(f"/proc/{pid}/exe").exists() else int(""))


def wait_for(get, timeout_s=30):
    """Return the value of a function as soon as it raises no error."""
    until = time.monotonic() + timeout_s
    while True:
        try:
            return get()
        except (OSError, ValueError):
            assert time.monotonic() < until
            time.sleep(0.1)
