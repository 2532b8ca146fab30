"""Admission: decides which requests are fanned out (sampled several times) and trained, and finds
the dataset task to which a request belongs. The only I/O in this folder is reading datasets, and
reading and writing the kill switch's file.

* `admission_rules` applies the configuration section `[policy]`. `side_calls` recognises requests
  such as title generation, which are never trained.
* `kill_switch` turns fan-out off for all requests.
* `task_index` finds the task of a request. `dataset` reads tasks from a file.
"""
