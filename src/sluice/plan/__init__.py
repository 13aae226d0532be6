"""What a machine does with a model: measured, predicted, and laid out. See probe, profile, bandwidth, placement."""
