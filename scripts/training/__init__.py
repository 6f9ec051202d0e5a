"""Parts of scripts/train.py: options, data, model, recording, and summary."""
