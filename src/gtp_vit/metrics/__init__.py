"""Measures of the distance between a reduced model's outputs and the unreduced one's, for each kind of output."""
