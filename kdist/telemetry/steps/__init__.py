"""Timing of training steps, and the diagnosis of what slows them down."""
