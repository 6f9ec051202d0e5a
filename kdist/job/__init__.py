"""Joining a job: handshake, servers, socket filters, and the coordinator of other tasks."""
