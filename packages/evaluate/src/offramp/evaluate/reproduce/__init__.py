"""Experiments of papers as commands: trained from nothing, measured in the engine, put beside the paper's numbers."""
