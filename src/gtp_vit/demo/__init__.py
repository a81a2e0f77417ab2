"""The web page of gtp-vit demo: a picture, a share of the MACs and a method, and what they do to a model.

demo_model.py is the model that is shown (exported_model.py an exported file), upload.py reads what people send,
inspection.py computes, markup.py writes HTML, page.py lays out and wires, serve.py listens. What a person sees is
computed from that person's inputs alone: nothing is kept between two calls but what depends on the model and the
settings only.
"""
