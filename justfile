# Recipes for development. Each is a short command that can also be typed by hand.

# check format, lint, types, import layers and docs
check:
    .ci/check

# run all quick tests that need neither a GPU nor a network, in parallel
test *arguments:
    pytest {{arguments}}

# run the tests that start several processes or take long
slow:
    .ci/slow

# run the demo and its two controls, and check the results
demo folder=`mktemp -d`:
    .ci/demo {{folder}}

# measure what the proxy adds to a request
bench *arguments:
    python -m benchmarks.proxy_overhead {{arguments}}

# measure the tracked figures, append them to benchmarks/history.jsonl, report regressions, draw the chart
track *arguments:
    python -m benchmarks.track {{arguments}}

# measure tokens per second of the engines, directly and through proxy and server
bench-rollout *arguments:
    python -m benchmarks.rollout {{arguments}}

# measure what sharing prefixes saves in a training step, compared with naive rows and TRL
bench-forest *arguments:
    python -m benchmarks.forest {{arguments}}

# check the docs against the code, and build the docs site in site/; needs the extra `docs`
docs:
    pytest -q -n 0 tests/test_docs.py tests/test_reference.py
    NO_MKDOCS_2_WARNING=1 mkdocs build --strict

# write the pages of the docs that are generated from the code, docs/reference/*.md
reference:
    python -m docs.reference_pages

# run the tests marked `live` and `long`, and the long benchmarks
long:
    .ci/live -m live
    pytest -n 0 -m 'long and not live and not clients and not real'
    .ci/clients .venv-clients -m clients tests/clients/test_faults.py
    .ci/real .venv-real -m 'real and long'
    .venv-real/bin/python -m benchmarks.demo_engines
    python -m benchmarks.forest
    python -m benchmarks.opencode_sessions --seeds 1
    python -m benchmarks.opencode_sessions --seeds 1 --gated
    python -m benchmarks.planted_steps --parallel 2
    python -m benchmarks.rescore_predicts
    python -m benchmarks.retrain_gain
    python -m benchmarks.async_steps
    python -m benchmarks.edits_or_thumbs
    python -m benchmarks.fake_gate_runs --parallel 4
    python -m benchmarks.feedback_latency
    python -m benchmarks.mixed_traffic
    python -m benchmarks.soak
    python -m benchmarks.swarm_load
    python -m benchmarks.demo_kills
    python -m benchmarks.container_steps

# run the tests with SDKs and coding agents from PyPI and npm, in an environment that is created if needed
clients folder=".venv-clients":
    .ci/clients {{folder}}

# run the tests with vLLM, verl and Ray on the CPU, in an environment that is created if needed
real folder=".venv-real":
    .ci/real {{folder}}

# run everything in a fresh environment, as CI does
ci:
    .ci/run
