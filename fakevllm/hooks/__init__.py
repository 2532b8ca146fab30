"""Hooks: the user's own functions, which score answers and decide how many siblings to request.

The contract is in spec.py; README.md describes promises, failure reasons and limits. Hooks run in a
process of their own, so that no failure of a hook affects the app. The proxy never imports a hook.
"""
