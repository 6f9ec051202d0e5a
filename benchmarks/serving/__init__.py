"""Servers under load: clients that count and check answers, our server, and its rivals.

Rivals run in environments of their own, without kdist: this module imports nothing.
"""
