"""What each iteration computes: iteration-level batching, fairness, preemption. No tensors."""
