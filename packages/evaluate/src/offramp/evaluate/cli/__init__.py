"""`offramp evaluate` and `offramp report`."""
