"""Parts of `benchmarks.demo_kills`: an app beside the replay, kills of processes, and checks."""
