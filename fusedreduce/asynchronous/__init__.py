"""The asynchronous mode: contributions that meet across ranks of any speed, and ranks made equal again."""
