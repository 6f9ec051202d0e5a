"""Tunes an exported model before it serves: `scripts/serve.py --tune`."""
