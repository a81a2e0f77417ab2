"""How far a reduced model's outputs are from the unreduced one's, for each kind of output."""
