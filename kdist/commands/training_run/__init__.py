"""Parts of `kdist train`: options, data, model, recording, and summary."""
