"""The tasks of a job: discovery, handshake, liveness, heartbeat, and remote access.

    cluster = kdist.Cluster.resolve()     # from the variables of an engine, such as TF_CONFIG
    cluster.is_chief, cluster.num_workers

Nothing in this package imports TensorFlow.
"""

from kdist.cluster.cluster import ROLES, Cluster

__all__ = ["ROLES", "Cluster"]
