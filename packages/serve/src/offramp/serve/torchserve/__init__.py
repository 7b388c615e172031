"""TorchServe as the web front of the engine: the model folder, the handler in its worker, and a server on loopback."""
