"""Parts of `benchmarks.demo_kills`: an app that runs beside the demo, kills of processes, and
checks."""
