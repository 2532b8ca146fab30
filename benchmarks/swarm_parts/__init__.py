"""Parts of `benchmarks.swarm_load`: a minimal server for comparison, waves of episodes, and a
writer of large journals."""
