"""Sluice runs Mixture-of-Experts language models that are larger than memory."""

__version__ = "0.1.0"
