"""Ready hooks: one file each, readable alone, meant to be copied."""
