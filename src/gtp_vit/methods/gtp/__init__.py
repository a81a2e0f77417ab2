"""GTP, the paper's method: settings and reducer (method.py), and its formulas as pure functions.

Equations are numbered as in the arXiv version; docs/explanation/paper-map.md leads from each to its function.
"""

from gtp_vit.methods.gtp.method import GTP as GTP
