"""The pages of the console: one module for each page, with its routes and nothing else.

Each route reads the ledger in a thread of its own, because its function is not a coroutine. A page
reads a bounded number of rows.
"""
