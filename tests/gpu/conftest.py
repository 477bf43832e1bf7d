"""Tests on a GPU take the first kernel configuration that fits, see untuned.py."""

import torch

if torch.cuda.is_available():
    from tests.gpu import untuned

    untuned.install()
