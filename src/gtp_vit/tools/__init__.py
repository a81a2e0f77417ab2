"""What the commands call; each tool returns a result that can be saved."""
