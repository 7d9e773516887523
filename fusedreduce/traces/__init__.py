"""Recorded traces: read, checked, merged, told as figures and as a timeline."""
