"""Synchronisation modes other than Synchronous: bounded staleness, and the asynchronous mode."""
