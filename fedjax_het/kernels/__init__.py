"""Convolutions, pooling and matrix products, as models call them."""
