"""The error of a setting that cannot be used."""


class ConfigError(ValueError):
    """A setting that cannot be used; the message names the setting, the value and the fix."""
