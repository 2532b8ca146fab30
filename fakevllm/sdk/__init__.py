"""Active clients of a swarm server: agents that claim episodes, run them and say what they were
worth. `from fakevllm import SwarmClient`."""
