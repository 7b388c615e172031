"""What an engine says of itself: time by part, records of iterations and requests."""
