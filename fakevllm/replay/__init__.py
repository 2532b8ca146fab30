"""Plays the user: a dataset sent row by row through the unmodified app, or straight through the
OpenAI endpoint."""
