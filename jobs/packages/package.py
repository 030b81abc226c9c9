# For Spack: copy to packages/py_odc_mpi/package.py of a repository of your own, then spack install py-odc-mpi.
# The checkout: spack develop --path CHECKOUT py-odc-mpi@main. isal, which only makes reading faster, is left out.
# ruff: noqa: D100, F403, F405
from spack.package import *
from spack_repo.builtin.build_systems.python import PythonPackage


class PyOdcMpi(PythonPackage):
    """An MPI runtime for post-training language models."""

    license("MIT")
    version("main", branch="main")

    depends_on("python@3.10:3.13", type=("build", "run"))
    depends_on("py-setuptools", type="build")
    depends_on("mpi", type=("build", "link", "run"))
    with default_args(type=("build", "run")):
        depends_on("py-h5py@3.15: ~mpi")
        depends_on("py-matplotlib@3.8:")
        depends_on("py-mpi4py@4.1:")
        depends_on("py-numpy@2:")
        depends_on("py-pyyaml@6:")
        depends_on("py-rich@13:")
        depends_on("py-safetensors@0.4:")
        depends_on("py-tokenizers@0.20:")
        depends_on("py-torch@2.9:")
        depends_on("py-transformers@5.13:")
        depends_on("py-typing-extensions@4.12:")
