"""Typed run configuration: the schema, its cross-checks and how it is loaded."""

from megatron_lt2.config.schema import RunConfig

__all__ = ["RunConfig"]
