"""Tools that read, convert and describe checkpoints; `convert.py` is the command."""
