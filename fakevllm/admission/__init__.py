"""Admission: decides which requests are fanned out (sampled several times) and trained, and finds
the task of a request. The folder does no I/O, except for the file of the kill switch and the
reading of datasets.

* `admission_rules` applies the configuration section `[policy]`. `side_calls` recognises requests
  such as title generation, which are never trained.
* `kill_switch` turns fan-out off for all requests.
* `task_index` finds the task of a request. `dataset` reads tasks from a file.
"""
