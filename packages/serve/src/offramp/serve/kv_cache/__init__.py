"""The paged key/value cache: which blocks are whose (no tensors), and the tensors themselves."""
