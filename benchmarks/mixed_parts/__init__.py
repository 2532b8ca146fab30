"""Parts of `benchmarks.mixed_traffic`: clients and apps, the processes under test, and checks."""
