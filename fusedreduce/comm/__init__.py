"""Communication: the Communicator protocol, torch.distributed behind it, agreement, and the stall monitor."""
