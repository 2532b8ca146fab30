"""Engines behind the server: rollouts, which sample answers, and trainers, which update the
weights.

Only this folder imports torch, transformers, Ray, vLLM, verl and xgrammar. These libraries run in
processes of their own, not in the server's process.
"""
