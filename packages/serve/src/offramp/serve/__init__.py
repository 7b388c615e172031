"""Serving of early-exit models: the batching engine, the OpenAI protocol, TorchServe and the benchmark."""
