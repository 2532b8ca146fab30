"""Child processes that a command starts and keeps running: the server and the proxy.

`fakevllm up`, `demo`, `train` and `retrain` use this folder. A process that dies is started again,
and `restart_policy` decides when, and when to give up. `supervisor` runs several processes and
stops them in reverse order. `output` says where a process's output goes. `run_folder` creates the
folder of a run, and `pid_file` says which process runs `fakevllm up` on it.

The folder knows nothing about models, requests or training.
"""
