"""Hooks: the user's own functions, which score answers and decide how many siblings to request.

The contract is spec.py; README.md describes promises, reasons and limits. Hooks run in a process of
their own, so that nothing a hook does reaches the app. The proxy never imports a hook.
"""
