"""Pure planning: layouts of buckets. No torch, no communication, no kernels."""
