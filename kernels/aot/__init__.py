"""Compiles every kernel ahead of time, without a GPU, and checks the machine code; nothing here runs in training."""
