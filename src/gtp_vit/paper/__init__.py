"""GTP-ViT (WACV 2024) as pure functions: tensors in, tensors out. Equations are numbered as in the arXiv version.

docs/paper-map.md leads from each equation to its function.
"""
