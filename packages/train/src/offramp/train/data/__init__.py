"""Rows of text -> token batches, in an order that is deterministic, rank-aware and resumable."""
