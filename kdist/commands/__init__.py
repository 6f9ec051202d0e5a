"""Programs of the `kdist` command, one module each; `scripts/*.py` run them as well."""
