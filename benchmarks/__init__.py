"""Programs behind every claim about speed; run them from the repository's root with `python -m`."""

import os

# oneDNN's kernels on every CPU, as PyTorch uses them. Set before TensorFlow is imported.
os.environ.setdefault("TF_ENABLE_ONEDNN_OPTS", "1")
