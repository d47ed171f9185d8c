"""Layers of a network: which they are, and the gradients of single samples in them."""
