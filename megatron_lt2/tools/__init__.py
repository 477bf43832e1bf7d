"""Small command-line tools around a run: start ranks, read metrics, plot a loss, generate text."""
