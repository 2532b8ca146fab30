"""`fakevllm replay`: send a dataset, row by row. The rows go to the proxy directly, or through an
app that uses the proxy.

Each row of the dataset has exactly one result: the row is answered, the row fails, or the row is
left for the next replay. Finished rows are recorded in a state file, so an interrupted replay can
resume. When the trainer has a full batch of groups to train, further rows wait. This folder does
not score or train anything. For the proxy, a replayed row is an ordinary request whose API key
names the row's task.
"""
