"""The door to the kernels on a machine without them: torch's operators, against sums element by element."""

import subprocess
import sys
from unittest.mock import MagicMock, call

import numpy as np
import pytest
import torch
from kernel_cases import (
    TARGETS,
    add_naively,
    assert_same,
    assert_same_number,
    flatten_naively,
    random_segments,
    random_slots,
    random_values,
)

from odc_mpi.comm.kernels import native


@pytest.fixture
def no_cache():
    """Forget the cached result of the search for CuPy."""
    find = native._cupy
    find.cache_clear()
    yield
    find.cache_clear()


@pytest.mark.parametrize("dtype", TARGETS, ids=str)
@pytest.mark.parametrize("special", [0.0, 0.02, 0.3])
def test_flatten_casts_lays_out_and_measures(dtype, special):
    for seed in range(30):
        rng = np.random.default_rng(seed)
        segments, filled = random_segments(rng, int(rng.integers(0, 9)), special=special)
        numel = filled + int(rng.choice([0, 0, 7]))
        flat = torch.full((numel,), float("nan"), dtype=dtype)
        largest = native.flatten(segments, flat)
        wanted, wanted_largest = flatten_naively(segments, numel, dtype)
        assert_same(flat, wanted)
        assert_same_number(largest, wanted_largest)


@pytest.mark.parametrize("dtype", TARGETS, ids=str)
@pytest.mark.parametrize("special", [0.0, 0.1])
def test_slots_are_added_in_their_order(dtype, special):
    for seed in range(30):
        rng = np.random.default_rng(seed)
        numel = int(rng.integers(1, 60))
        shard = random_values(rng, (numel,), dtype, special)
        slots = random_slots(rng, numel, int(rng.integers(0, 6)), special)
        wanted = add_naively(shard, slots)
        native.add_segments_(shard, slots)
        assert_same(shard, wanted)


def test_an_imaginary_part_is_as_negative_as_it_looks():
    imaginary = torch.tensor([1 + 2j, 3 - 4j]).conj().imag
    assert imaginary.is_neg() and not native._as_contiguous_input(imaginary, torch.empty(0)).is_neg()
    assert native._as_contiguous_input(imaginary, torch.empty(0)).tolist() == [-2.0, 4.0]


def test_nothing_to_lay_out():
    assert_same_number(native.flatten([(0, torch.ones(0))], torch.ones(0)), 0.0)


@pytest.mark.parametrize("segments", [[(0, 3), (2, 3)], [(4, 1), (0, 1)], [(-1, 2)], [(7, 2)]], ids=str)
def test_segments_that_overlap_or_exceed_the_array(segments):
    with pytest.raises(AssertionError, match="segments"):
        native.flatten([(start, torch.ones(numel)) for start, numel in segments], torch.zeros(8))


@pytest.mark.parametrize(("start", "numel"), [(-1, 2), (7, 2), (8, 1)])
def test_a_slot_beyond_the_shard(start, numel):
    with pytest.raises(AssertionError, match=f"segment {start} to {start + numel} of a shard of 8"):
        native.add_segments_(torch.zeros(8), [(start, torch.ones(numel))])


def test_why_there_are_no_kernels(monkeypatch, no_cache):
    gpu = torch.device("cuda", 0)
    assert "the torch device cpu" in native.kernels_unavailable_reason(torch.device("cpu"))
    monkeypatch.setitem(sys.modules, "cupy", None)
    assert native.kernels_unavailable_reason(gpu).startswith("CuPy is not installed: pip install 'odc_mpi[cuda13]'")
    monkeypatch.setattr(native, "_cupy", lambda: sys)
    assert native.kernels_unavailable_reason(gpu) is None
    monkeypatch.setenv("ODC_MPI_KERNELS", "off")
    assert native.kernels_unavailable_reason(gpu) == "ODC_MPI_KERNELS is off"
    monkeypatch.setattr(torch.version, "hip", "6.4")
    assert "ROCm" in native.kernels_unavailable_reason(gpu)


def test_a_cupy_that_cannot_be_imported_is_reported(monkeypatch, tmp_path, no_cache):
    (tmp_path / "cupy.py").write_text("raise ImportError('libcuda.so.1:\\ncannot open shared object file')\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "cupy", raising=False)
    with pytest.raises(RuntimeError, match=r"libcuda.so.1: cannot open .*set ODC_MPI_KERNELS=off"):
        native.kernels_unavailable_reason(torch.device("cuda", 0))
    monkeypatch.setenv("ODC_MPI_KERNELS", "off")
    assert native.kernels_unavailable_reason(torch.device("cuda", 0)) is not None


def test_a_kernel_that_cannot_be_built_is_reported(monkeypatch):
    class Broken:
        __version__ = "14"

        def RawModule(self, **options):  # noqa: N802
            raise OSError("no libnvrtc.so")

    monkeypatch.setattr(native, "_cupy", Broken)
    native._kernel.cache_clear()  # where there is a GPU other tests have built it
    message = r"CuPy 14 cannot build .*flatten.cu: no libnvrtc.so. Set ODC_MPI_KERNELS=off"
    with pytest.raises(RuntimeError, match=message):
        native._kernel("flatten")


@pytest.mark.parametrize(("num_blocks", "launched"), [(1, 1), (1000, 320)])
def test_a_launch_goes_to_torch_s_stream_and_device(monkeypatch, num_blocks, launched):
    """Check the arguments passed to CuPy. Their effect is tested on a GPU only."""
    cupy, cuda = MagicMock(), MagicMock()
    cuda.current_stream.return_value.cuda_stream = 4711
    cuda.get_device_properties.return_value.multi_processor_count = 10
    monkeypatch.setattr(native, "_cupy", lambda: cupy)
    monkeypatch.setattr(torch, "cuda", cuda)
    native._kernel.cache_clear()
    native._stream.cache_clear()
    gpu, arguments = torch.device("cuda", 3), (np.zeros(1, dtype=native._TABLE), np.int32(0))
    native._run("flatten", gpu, num_blocks, arguments)
    native._kernel.cache_clear()
    native._stream.cache_clear()
    ((stream,), _) = cupy.cuda.Stream.from_external.call_args
    assert stream.__cuda_stream__() == (0, 4711)
    cupy.cuda.Stream.from_external.return_value.__enter__.assert_called_once()
    assert (cuda.device.mock_calls[0], cupy.cuda.Device.mock_calls[0]) == (call(gpu), call(3))
    cupy.RawModule.assert_called_once_with(code=native.read_source("flatten"), options=("-std=c++17",))
    get_function = cupy.RawModule.return_value.get_function
    get_function.assert_called_once_with("flatten")
    get_function.return_value.assert_called_once_with((launched,), (native.THREADS,), arguments)


@pytest.mark.parametrize("name", ["flatten", "add_segments"])
def test_a_source_is_one_text(name):
    text = native.read_source(name)
    assert "#include" not in text and text.count("struct Segments") == 1 and f"\n{name}(const" in text


def test_sources_that_are_nowhere(monkeypatch, tmp_path):
    monkeypatch.setattr("odc_mpi.__file__", str(tmp_path / "odc_mpi" / "__init__.py"))
    with pytest.raises(FileNotFoundError, match="has the sources of the kernels"):
        native.source_dir()


def test_cupy_is_not_imported_where_there_is_no_gpu(tmp_path):
    """Not even where it is installed."""
    (tmp_path / "cupy.py").write_text("raise SystemExit('cupy was imported')\n")
    program = (
        "import importlib, pkgutil, sys, torch\n"
        "from odc_mpi import api, comm, shard\n"
        "from odc_mpi.comm.kernels import native\n"
        "for folder in (comm, shard):\n"
        "    for module in pkgutil.iter_modules(folder.__path__, folder.__name__ + '.'):\n"
        "        importlib.import_module(module.name)\n"
        "native.flatten([(0, torch.ones(3))], torch.empty(3))\n"
        "native.add_segments_(torch.ones(3), [(0, torch.ones(3))])\n"
        "print([name for name in sys.modules if name.startswith('cupy')])\n"
    )
    paths = [str(tmp_path), *filter(None, sys.path)]
    arguments = [sys.executable, "-c", f"import sys; sys.path[:0] = {paths!r}\n{program}"]
    done = subprocess.run(arguments, capture_output=True, text=True, timeout=100)
    assert done.stdout == "[]\n", done.stderr
