"""Calibrate early-exit language models with a guarantee, and measure their quality against their cost."""
