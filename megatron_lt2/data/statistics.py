"""Numbers about a stream of token ids."""

import numpy as np


def unigram_entropy(tokens: np.ndarray) -> float:
    """Entropy in nats of the empirical distribution of these same tokens.

    It is the loss of the best model that knows only how often each token occurs in this very
    stream, so a language model that learned anything from context scores below it.

    Args:
        tokens: integer ids of any shape and any integer dtype; at least one.

    Raises:
        ValueError: there are no tokens, or they are not integers.
    """
    ids = np.asarray(tokens).reshape(-1)
    if ids.size == 0:
        raise ValueError("unigram_entropy needs at least one token")
    if not np.issubdtype(ids.dtype, np.integer):
        raise ValueError(f"unigram_entropy needs integer token ids, got {ids.dtype}")
    _, counts = np.unique(ids, return_counts=True)
    probability = counts / ids.size
    return float(-(probability * np.log(probability)).sum())
