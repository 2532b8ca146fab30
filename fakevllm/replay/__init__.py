"""`fakevllm replay`: send a dataset through the proxy or through the unmodified app, row by row.

Each row ends exactly once: answered, failed, or left for the next run. Finished rows are noted in a
state file, so an interrupted replay resumes. Rows wait while the trainer has a full batch waiting.
This folder never scores or trains anything; to the proxy a replayed row is an ordinary request with
its task's API key.
"""
