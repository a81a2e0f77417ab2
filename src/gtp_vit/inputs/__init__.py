"""What goes in: models by name, and images as a model wants them."""
