"""Tunes settings of a training on this machine."""
