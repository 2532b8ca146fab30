"""`fakevllm replay`: send a dataset through the proxy or through the unmodified app, row by row.

Each row ends exactly once: answered, failed, or left for the next run. Finished rows are noted in a
state file, so an interrupted replay resumes. Rows are held back while a full batch of groups waits
for the trainer. This folder never scores or trains anything. For the proxy, a replayed row is an
ordinary request with the API key of its task.
"""
