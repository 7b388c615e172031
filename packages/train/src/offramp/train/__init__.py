"""Training of early-exit models: data, losses, Lightning modules, the DeepSpeed pipeline, tracking and export."""
