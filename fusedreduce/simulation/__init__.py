"""A backward on many ranks, simulated: known models, kinds of cluster, how ranks differ. Commands alone import it."""
