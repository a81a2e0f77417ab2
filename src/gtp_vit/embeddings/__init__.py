"""Embeddings of many images: as they come, in Python, or in a folder of files that a killed run resumes from."""
