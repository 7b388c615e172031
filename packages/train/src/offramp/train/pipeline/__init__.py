"""Pipeline parallelism with early exits: DeepSpeed's engine, taught to back-propagate a loss from every stage."""
