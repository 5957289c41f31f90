# Two commands do everything on a machine that has Python 3.12:  make demo   and   make test
# The first of them sets up .venv; later runs skip that until what it installs changes.

READY := .venv/.ready
PY := .venv/bin/python
# Two files of tests at a time: ranks wait for much of theirs.
IN_TWO := -n 2 --dist loadfile --no-loadscope-reorder

.PHONY: demo test test-megatron test-deepspeed check bench-planning show-planning show-regroup show-numerics show-agreement show-recovery show-returns show-deepspeed show-deepspeed-returns show-corruption show-copies show-simulator bench-lanes show-overhead show-live-overhead show-soak show-outside show-megatron-recipes show-experts show-layers show-trainers show-scripts show-recipes show-widths soak-cycles megatron-flags signatures docs clean

demo: $(READY)
	.venv/bin/ntp plan recipes/plan/two-gpus-short.toml
	rm -rf build/demo
	.venv/bin/ntp chaos recipes/chaos/megatron-demo.toml --out build/demo

test: $(READY)  # on real Megatron and DeepSpeed a slice, in processes of their own, because these change torch when imported
	$(PY) -m pytest $(IN_TWO)
	$(PY) -m pytest tests/megatron -m short
	$(PY) -m pytest tests/deepspeed -m short

test-megatron: $(READY)  # all tests on real Megatron: some hours on two cores
	$(PY) -m pytest tests/megatron

test-deepspeed: $(READY)  # all tests on real DeepSpeed: some hours
	$(PY) -m pytest tests/deepspeed

check: $(READY)
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/mypy
	.venv/bin/lint-imports --no-cache
	$(PY) -m pytest tests/unit/test_house.py

bench-planning: $(READY)
	$(PY) -m benchmarks.planning

show-planning: $(READY)
	$(PY) -m benchmarks.planning --show

show-regroup: $(READY)  # SCALE=ci for a minute's slice, SCALE=full for 4, 8 and 16 ranks
	$(PY) -m benchmarks.regroup

show-numerics: $(READY)  # half an hour; SCALE=ci for a slice of a few minutes, SCALE=full for every feature in every layout
	$(PY) -m benchmarks.numerics

show-agreement: $(READY)  # some minutes; SCALE=ci for fewer members
	$(PY) -m benchmarks.agreement

show-recovery: $(READY)  # for long; SCALE=ci for three trials
	$(PY) -m benchmarks.recovery

show-returns: $(READY)  # ten minutes; SCALE=ci for three returns
	$(PY) -m benchmarks.returns

show-deepspeed: $(READY)  # half an hour; SCALE=ci for a slice of some minutes
	$(PY) -m benchmarks.deepspeed_numerics

show-deepspeed-returns: $(READY)  # twenty minutes; SCALE=ci for three returns of two kinds
	$(PY) -m benchmarks.deepspeed_returns

show-corruption: $(READY)  # eight minutes; SCALE=ci for half a minute
	$(PY) -m benchmarks.corruption

show-copies: $(READY)  # on a quiet machine, an hour or two; SCALE=ci for a slice, ROWS=spared or ROWS=busy for some of the jobs
	$(PY) -m benchmarks.copies

show-simulator: $(READY)  # ten minutes; SCALE=ci for a slice of three, with 20,000 schedules
	$(PY) -m benchmarks.simulator

bench-lanes: $(READY)  # SCALE=ci for fewer layouts and rounds
	$(PY) -m benchmarks.lanes

show-overhead: $(READY)  # on a quiet machine; SCALE=ci for a slice
	$(PY) -m benchmarks.overhead

show-live-overhead: $(READY)  # on a quiet machine, two hours or more; it goes on where it ended; SCALE=ci for a slice, FRAMEWORK=deepspeed for its rows alone
	$(PY) -m benchmarks.live_overhead

show-soak: $(READY)  # 45 minutes; SCALE=ci for four faults in each of two jobs, SCALE=pairs for every kind at every moment, SCALE=full for more than a thousand; it goes on where it ended
	$(PY) -m benchmarks.soak

show-outside: $(READY)  # two hours or more; it goes on where it ended; SCALE=ci for twelve faults, ROWS=plain,... for some of the jobs
	$(PY) -m benchmarks.outside

show-megatron-recipes: $(READY)  # hours; MEGATRON_LM=path of a checkout; ROWS=name,... for some; it goes on where it ended
	$(PY) -m benchmarks.megatron_recipes

show-layers: $(READY)  # twenty minutes; SCALE=ci for three jobs
	$(PY) -m benchmarks.layers

show-experts: $(READY)  # half an hour; ROWS=feature,... for some; it goes on where it ended
	$(PY) -m benchmarks.experts

show-trainers: $(READY)  # twenty minutes; CONFIGS=path[:path...] of checkouts with DeepSpeed configurations
	$(PY) -m benchmarks.trainers

show-scripts: $(READY)  # half an hour or more; it goes on where it ended; SCRIPTS=path of a checkout of DeepSpeedExamples (its CIFAR-10 needs the extra `scripts`); ROWS=name,... for some
	$(PY) -m benchmarks.others_scripts

show-recipes: $(READY)  # most of an hour; it goes on where it ended
	$(PY) -m benchmarks.recipes

show-widths: $(READY)  # ten minutes
	$(PY) -m benchmarks.widths

soak-cycles: $(READY)
	CYCLES=500 $(PY) -m pytest tests/ranks/test_endurance.py -k leave_nothing_behind

megatron-flags: $(READY)  # writes docs/megatron-flags.md, the page of all flags of the installed Megatron
	$(PY) -W ignore -m ntp_plugin.megatron.flag_table docs/megatron-flags.md

signatures: $(READY)  # writes the tables of the frameworks' signatures that the tests ran with
	$(PY) -W ignore -m benchmarks.signatures ntp_plugin/tested_versions

docs: $(READY)  # the pages as a site in build/site; fails where a link leads nowhere
	.venv/bin/mkdocs build --strict

clean:
	rm -rf .venv build .pytest_cache .mypy_cache .ruff_cache .hypothesis

$(READY): pyproject.toml constraints.txt .ci/setup .ci/transformer-engine.txt hatch_build.py ntp_plugin/copies/machine.c
	@bash .ci/setup
