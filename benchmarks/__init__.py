"""Programs behind every claim about speed; run them from the repository's root with `python -m`."""
