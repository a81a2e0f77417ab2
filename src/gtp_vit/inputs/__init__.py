"""Models by name, and images prepared as a model needs them."""
