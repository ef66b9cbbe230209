"""Traces modules of torchvision and the transformers library and compares each, cut into cells, with itself."""
