"""Showing results: plots, pictures, tables and pages, for the command line and whoever else wants them."""
