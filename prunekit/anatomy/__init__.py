"""What a model is made of: layers, prunable weights, costs."""
