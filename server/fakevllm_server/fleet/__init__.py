"""A fleet of rollout replicas: several engines that sample with the same weights.

* `router` decides which replica answers a call. It is pure.
* `replica` is one engine of the fleet: its rollout, its HTTP client, its state and its figures.
* `health_watch` decides from health checks whether a replica hangs. It is pure.
* `rollout` drives the replicas as one `Rollout`: it starts them, loads new weights into one after
  the other, takes out replicas that fail, and starts them again.
* `weight_copy` keeps the fleet's current weights for replicas that are started again.
* `engine_figures` reads the queue and the prefix cache of a replica from its metrics.
* `metrics` puts the metrics of all replicas on one page.

A server with one engine does not use this folder. The folder never decides when weights are
published, and never trains.
"""
