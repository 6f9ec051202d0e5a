"""The part of a training step that runs in the graph of one replica."""
