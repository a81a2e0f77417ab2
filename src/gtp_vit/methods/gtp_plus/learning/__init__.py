"""What GTP+ learns of a model: from backward passes, before any search."""
