"""The settings of a broker: `table` declares and reads them, `values` are what they may be, `markdown` shows them."""

from anabranch.server.settings.table import (
    DEFAULT_METRICS_LISTENER,
    Settings,
    SettingsError,
    described,
    explicit,
    from_environment,
    layered,
    read_properties,
)
from anabranch.server.settings.values import Address, parse_address

__all__ = [
    "DEFAULT_METRICS_LISTENER",
    "Address",
    "Settings",
    "SettingsError",
    "described",
    "explicit",
    "from_environment",
    "layered",
    "parse_address",
    "read_properties",
]
