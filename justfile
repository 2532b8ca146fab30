# One door: every recipe is a line a person or a CI machine can also type.

# format, lint, types, import ladder, docs
check:
    .ci/check

# all quick tests that need neither a GPU nor a network, in parallel
test *arguments:
    pytest {{arguments}}

# tests that start several processes or take long
slow:
    .ci/slow

# the demo and its two controls, with their checks
demo folder=`mktemp -d`:
    .ci/demo {{folder}}

# what the proxy adds to a request
bench:
    python -m benchmarks.proxy_overhead

# tokens per second of the engines, directly and through proxy and server
bench-rollout *arguments:
    python -m benchmarks.rollout {{arguments}}

# what sharing prefixes saves a training step, beside naive rows and TRL
bench-forest *arguments:
    python -m benchmarks.forest {{arguments}}

# the docs site in site/, after a check that the docs agree with the code; needs the extra `docs`
docs:
    pytest -q -n 0 tests/test_docs.py
    NO_MKDOCS_2_WARNING=1 mkdocs build --strict

# real apps, data and peers that a machine may lack, and how fast the forest is
long:
    .ci/live
    pytest -n 0 -m long
    python -m benchmarks.forest
    python -m benchmarks.opencode_sessions --seeds 1
    python -m benchmarks.mixed_traffic
    python -m benchmarks.swarm_load
    python -m benchmarks.demo_kills

# SDKs and coding agents as PyPI and npm have them, in an environment that is made where it is not there yet
clients folder=".venv-clients":
    .ci/clients {{folder}}

# vLLM, verl and Ray on the CPU, in an environment that is made where it is not there yet
real folder=".venv-real":
    .ci/real {{folder}}

# everything, from a fresh environment
ci:
    .ci/run
