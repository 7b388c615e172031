"""What is asked of the engine, how far it has come, and what it gives back. Plain data, no tensors."""
