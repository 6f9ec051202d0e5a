"""A convolution for tests that change what they are about."""

from kdist.planner import LayerWork


def convolution(**changed):
    """Returns the work of a small convolution, with some of its numbers changed."""
    return LayerWork(
        **{
            "name": "conv",
            "kind": "convolution",
            "forward_flops": 200.0,
            "backward_flops": 400.0,
            "parameters": 27.0,
            "trainable_parameters": 27.0,
            "kept_bytes": 64.0,
            "moved_bytes": 300.0,
            "spatial": True,
            **changed,
        }
    )
