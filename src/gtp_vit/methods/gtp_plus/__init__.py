"""GTP+, our own method: settings and reducer (method.py), its arithmetic (merge.py), what it learns of a model."""

from gtp_vit.methods.gtp_plus.method import GTPPlus as GTPPlus
