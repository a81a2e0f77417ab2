"""Models by name, from files and folders, and the small one in the package."""
