"""Analysis after a run: pictures, layer similarity, t-SNE, reconstruction."""
