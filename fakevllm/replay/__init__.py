"""`fakevllm replay`: send a dataset, row by row, to the proxy or through an app that uses the
proxy.

Each row of the dataset has exactly one result: it is answered, it fails, or it is left for the next
replay. Finished rows are recorded in a state file, so an interrupted replay can resume. When the
trainer has a full batch of groups to train, further rows wait. This folder scores and trains
nothing: for the proxy, a replayed row is an ordinary request, whose API key names the row's task.
"""
