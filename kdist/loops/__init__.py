"""Training loops that programs write themselves: `kdist.step` and `kdist.session`."""
