"""Tensor parallelism: layers whose weights are divided over the devices of a stage.

After Shoeybi et al., "Megatron-LM", 2019 (arXiv:1909.08053), section 3. The first of two matrices
is divided by its columns, the second by its rows. The features between them stay divided, and the
devices communicate once, to add up the partial sums of the second matrix.

Each divided layer keeps the name and configuration of the plain layer. In files it also has the
class and the weights of the plain layer.
"""
