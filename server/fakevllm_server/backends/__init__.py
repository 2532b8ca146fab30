"""Backends: the rollout engines, which sample answers, and the trainers, which update the weights.

Only this folder imports torch, transformers, Ray, vLLM, verl and xgrammar. The backends that use
these libraries run in child processes, so the server's own process does not load them.
"""
