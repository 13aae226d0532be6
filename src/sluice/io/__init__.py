"""Moves bytes of model files into a memory pool. It knows nothing of models, caches or ggml."""
