"""The trainer with every mixer's output times zero: what a model without mixers would reach.

    python tests/slow/zeroed_mixers.py --config FILE [--dotted.name value]

Takes the arguments of `python -m megatron_lt2.train`.
"""

import sys
from typing import Any

from megatron_lt2.parallel import platform

platform.install()

from megatron_lt2.mixers.attention import FullAttention  # noqa: E402
from megatron_lt2.mixers.linear import LinearMixer  # noqa: E402
from megatron_lt2.train import main  # noqa: E402


def zero_output(mixer: type) -> None:
    """Multiply what `mixer.forward` returns by zero, and with it its gradients."""
    forward: Any = mixer.forward  # type: ignore[attr-defined]

    def zeroed(self: Any, *args: Any, **kwargs: Any) -> Any:
        output, bias = forward(self, *args, **kwargs)
        assert bias is None, "a bias would pass around the zero"
        return output * 0, None

    mixer.forward = zeroed  # type: ignore[attr-defined]


if __name__ == "__main__":
    for mixer in (FullAttention, LinearMixer):
        zero_output(mixer)
    sys.exit(main())
