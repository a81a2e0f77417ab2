"""The paper's tables: the printed figures with their settings, and ours beside them."""
