"""Tokenizers, token files and the datasets that the trainer reads."""
