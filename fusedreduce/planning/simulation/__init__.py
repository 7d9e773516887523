"""What `simulate` runs on: known models, kinds of cluster, and how ranks differ."""
