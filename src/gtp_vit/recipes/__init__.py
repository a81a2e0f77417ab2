"""Recipes: settings for one model as JSON. Some ship with the package, in this folder."""
