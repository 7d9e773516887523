"""What users wrap a model with: DistributedDataParallel, the hook for torch's own, DataParallel, SyncServer."""
