"""Embeddings where the images live: one class that Ray Data, Daft, Spark, Lance and the like schedule and feed."""
