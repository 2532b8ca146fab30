"""`fakevllm demo`: a tiny model learns to add, through the same processes and wires an app of
yours would use."""
