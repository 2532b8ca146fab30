"""Parts of `benchmarks.swarm_load`: a minimal server to compare with, waves of episodes, and a
writer of large journals."""
