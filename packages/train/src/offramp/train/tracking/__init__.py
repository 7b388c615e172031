"""Runs and models in MLflow: the logger, the registry, and the model flavour they share."""
