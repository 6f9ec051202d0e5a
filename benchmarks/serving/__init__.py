"""Servers under load: clients that check and count responses, kdist's server, and its rivals.

Rivals run in their own environments without kdist, so this module imports nothing.
"""
