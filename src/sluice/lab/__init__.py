"""What route traces say: measures, figures, simulated caches, gates. It runs no model."""
