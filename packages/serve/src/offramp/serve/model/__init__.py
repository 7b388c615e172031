"""The engine's forward: weights packed once, and the few operations it is made of."""
