"""The swarm server: owns the engines, captures every call, trains on finished groups and
episodes."""
