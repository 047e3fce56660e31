"""Convolution, pooling and matrix products for the models."""
