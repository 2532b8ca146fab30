"""Admission: decide which requests are trained, and find the dataset task of a request. A request
that is to be trained is sampled several times, which is called fan-out. This folder reads datasets,
and reads and writes the kill switch's file. It does no other I/O.

* `admission_rules` applies the configuration section `[policy]`. `side_calls` recognises requests
  such as title generation, which are never trained.
* `kill_switch` turns fan-out off for all requests.
* `task_index` finds the task of a request. `dataset` reads tasks from a file.
"""
