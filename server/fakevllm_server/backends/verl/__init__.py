"""verl's trainer (FSDP2) in Ray workers, as a trainer beside any rollout engine."""
