"""What a model writes, how deep it went for it, and what that is worth: what the benchmarks of quality share."""
