"""Replicas of a module on several devices of one process, run as one."""
