"""`fakevllm replay`: send a dataset through the proxy or through the unmodified app, row by row.

Each row of the dataset ends exactly once: it is answered, it fails, or it is left for the next
replay. Finished rows are noted in a state file, so an interrupted replay resumes. Rows wait while
the trainer has a full batch of groups to train. This folder never scores or trains anything. For
the proxy, a replayed row is an ordinary request with the API key of its task.
"""
