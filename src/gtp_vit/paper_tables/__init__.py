"""The paper's tables: what is printed there, the settings behind it, and ours beside it."""
