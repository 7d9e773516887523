"""CUDA without a GPU: what stands in for it, and the checker of the order of what is enqueued; README.md."""
