"""The step and epoch loops behind `kdist.Model`: `replicated` for every synchronous strategy."""
