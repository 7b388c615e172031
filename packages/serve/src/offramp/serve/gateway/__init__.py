"""The front door of TorchServe: every model and version under one address, for those who have a key."""
