"""What training and serving must agree on: the model, its exits, the checkpoint directory and the command line."""
