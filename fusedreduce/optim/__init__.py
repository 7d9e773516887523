"""Clipping and loss scaling: work on reduced gradients, up to the optimizer's step."""
