"""The ledger: every request, its siblings, their rewards, and what became of them, in SQLite."""
