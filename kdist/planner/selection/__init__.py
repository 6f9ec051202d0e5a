"""Choice among layouts, batches, and machines: candidates, predictions, constraints, ranking."""
