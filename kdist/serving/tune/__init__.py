"""Tunes an exported model before it serves: `kdist serve --tune`."""
