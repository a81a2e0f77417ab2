"""Long runs: journals to resume from, files that are written whole or not at all, several processes."""
