"""Names sessions, keys and completions. The name of another gateway than gateway 0 contains its
number, so that a load balancer and every other gateway find the gateway of a name.
"""

import re
import secrets
import zlib
from dataclasses import dataclass

from paceline.errors import FailedPrecondition


class OtherGateway(FailedPrecondition):
    """Another gateway has the session, key, completion or group."""

    reason = "OTHER_GATEWAY"
    gateway = 0  # the gateway's number


_DRAWN = re.compile(r"(?:[a-z-]+[-_])?(?:(\d{1,4})-)?[0-9a-f]{32,48}")


@dataclass(frozen=True, slots=True)
class GatewayNames:
    """Names of one gateway, and the addresses of all gateways of the run in order of number."""

    number: int = 0
    addresses: tuple[str, ...] = ("",)  # gRPC
    addresses_http: tuple[str, ...] = ("",)

    def draw(self, prefix: str = "", nbytes: int = 16) -> str:
        """A new name: the prefix, this gateway's number unless it is 0, and random bytes in hex."""
        number = f"{self.number}-" if self.number else ""
        return f"{prefix}{number}{secrets.token_hex(nbytes)}"

    def owns(self, name: str) -> bool:
        """Whether no other gateway drew the name."""
        return self._gateway_of(name) == self.number

    def require_own(self, name: str, *, group: bool = False, addressed: bool = True) -> None:
        """Raises OtherGateway with the number, and the address if `addressed`, of another gateway
        that has the name. A chosen name of a `group` belongs to one gateway; every other chosen
        name belongs to all.
        """
        other = self._gateway_of(name)
        if group and not _DRAWN.fullmatch(name):
            other = zlib.crc32(name.encode("utf-8", "surrogatepass")) % len(self.addresses)
        if other != self.number:
            message = "another gateway has this session, key, completion or group"
            allowed = f"gateway {other}"
            if addressed:
                allowed += f": HTTP {self.addresses_http[other]}, gRPC {self.addresses[other]}"
            error = OtherGateway(message, seen=f"gateway {self.number}", allowed=allowed)
            error.gateway = other
            raise error

    def _gateway_of(self, name: str) -> int:
        found = _DRAWN.fullmatch(name.partition(":")[0])
        number = self.number if found is None else int(found[1] or 0)
        return number if number < len(self.addresses) else self.number
