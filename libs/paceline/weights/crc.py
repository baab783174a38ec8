"""Joins the CRC-32s of two adjacent ranges without their bytes.

Appending n bytes multiplies the CRC, a polynomial over GF(2), by x^(8n) modulo the CRC-32
polynomial.
"""

from __future__ import annotations

from functools import lru_cache

_POLYNOMIAL = 0xEDB88320  # reflected: the highest bit is x^0
_ONE = 1 << 31


def joined_crc32(first: int, second: int, second_bytes: int) -> int:
    """CRC-32 (zlib's) of two adjacent ranges, the second with `second_bytes` bytes."""
    return _product(_power(second_bytes), first) ^ second


def _product(one: int, other: int) -> int:
    result = 0
    while one:
        if one & _ONE:
            result ^= other
        one = one << 1 & 0xFFFFFFFF
        other = other >> 1 ^ (_POLYNOMIAL if other & 1 else 0)
    return result


def _squares() -> tuple[int, ...]:
    found = [_ONE >> 8]
    while len(found) < 64:
        found.append(_product(found[-1], found[-1]))
    return tuple(found)


_SQUARES = _squares()
"""x^(8 * 2^k) modulo the polynomial, by k."""


@lru_cache(maxsize=4096)
def _power(nbytes: int) -> int:
    """x^(8 nbytes) modulo the polynomial."""
    result = _ONE
    for bit in range(nbytes.bit_length()):
        if nbytes >> bit & 1:
            result = _product(result, _SQUARES[bit])
    return result
