"""Layouts, bucketing, cost models and plans: pure, no torch, no communication, no kernels."""
