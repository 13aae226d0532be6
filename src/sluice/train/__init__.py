"""Training: models with expert locality, prerouter heads and adapters, with PyTorch. Imports nothing by itself."""
