"""From a registered model to the endpoint that answers for it: archives, TorchServe's management API, roll-out."""
