"""Training under `tf.distribute`: the trainer of `kdist.Model`, its step groups, and their steps.

docs/internals/one_step.md follows one training step in order. `replica` runs in the graph of one
replica, `groups` runs step groups, and `parameter_server` dispatches them to workers.
"""
