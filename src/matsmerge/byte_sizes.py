"""Numbers of bytes as people write and read them."""

import re

from matsmerge.errors import RecipeError

_UNITS = {
    "": 1,
    "k": 1e3,
    "m": 1e6,
    "g": 1e9,
    "t": 1e12,
    "ki": 2**10,
    "mi": 2**20,
    "gi": 2**30,
    "ti": 2**40,
}
_MAX_BYTES = 2**62  # more than any machine has


def parse_bytes(text: str) -> int:
    """`1.5GB`, `800 MiB` or `1000000` as a number of bytes."""
    match = re.fullmatch(r"\s*([\d.]+)\s*([kmgt]i?)?b?\s*", text.lower())
    try:
        num_bytes = float(match[1]) * _UNITS[match[2] or ""] if match else 0
        if not 1 <= num_bytes <= _MAX_BYTES:
            raise ValueError
        return int(num_bytes)
    except (ValueError, KeyError):
        raise RecipeError(f"'{text}' is not a size; write it as 500MB, 4GB or 2GiB") from None


def format_bytes(num_bytes: float) -> str:
    """`1.5 GB`, for people."""
    for unit in ("B", "kB", "MB", "GB"):
        if abs(num_bytes) < 999.5:  # else it would be shown as 1e+03
            return f"{num_bytes:.3g} {unit}"
        num_bytes /= 1000
    return f"{num_bytes:.3g} TB"
