"""Imported once by the fork server of tests/ranks.py: the slow imports that every rank needs."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["LT2_FORCE_CPU"] = "1"

from megatron_lt2.parallel import platform

platform.install()

import megatron_lt2.model.lt2_model  # noqa: E402, F401
import megatron_lt2.training.loop  # noqa: E402, F401
