"""Learning the calibration of GTP+ from backward passes, before any search."""
