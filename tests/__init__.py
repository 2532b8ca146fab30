"""Sentences that must hold."""
