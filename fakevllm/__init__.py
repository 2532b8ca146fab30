"""The proxy: serves the app, fans requests out, scores the answers, keeps the ledger."""
