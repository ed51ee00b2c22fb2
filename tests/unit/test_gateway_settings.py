"""Flags of the gateway: what is refused, by its name."""

from __future__ import annotations

import pytest

from gateway.settings import GatewaySettings
from slipstream.errors import ConfigError
from slipstream.settings import parse


@pytest.mark.parametrize("flag", ["--target", "--draft"])
@pytest.mark.parametrize("address", ["here", ":7", "here:", "here:seven", "here:0", "here:65536"])
def test_an_address_that_cannot_be_one(flag: str, address: str) -> None:
    with pytest.raises(ConfigError, match=f"{flag}: .*must be host:port.* '{address}'"):
        parse(GatewaySettings, ["--target=here:1", f"{flag}={address}"])


def test_a_missing_flag() -> None:
    with pytest.raises(ConfigError, match="^--target: is required$"):
        parse(GatewaySettings, [])
