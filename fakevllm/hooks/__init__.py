"""Hooks: the user's own functions. They score answers, and may decide how many answers are sampled
for a request.

spec.py defines the hook functions. README.md describes what users can rely on, the reasons of
failures, and the limits of a hook process. Hooks run in a separate process, so that no failure of a
hook affects the app. The proxy's own process never imports a hook.
"""
