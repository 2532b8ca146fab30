"""Pages of the docs site that list what is in the code: keys, flags, routes, columns, metrics.

One module per subject returns one `Page`; the table in `pages` names them. `just reference` writes
them to `docs/reference/`, and tests/test_reference.py fails when a page on disk is stale. The pages
must not depend on the machine, on the Python version, on the terminal or on optional packages, and
generating them must not import torch, vLLM or verl.
"""
