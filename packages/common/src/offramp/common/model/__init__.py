"""The multi-exit Transformer, defined once: it trains, and it is the oracle of every other forward."""
