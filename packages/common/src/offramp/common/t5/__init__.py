"""The multi-exit T5, defined once: encoder, decoder with cross-attention, exits on decoder layers."""
