"""The swarm server. It owns the engines, captures every model call, and trains on finished groups
and episodes."""
