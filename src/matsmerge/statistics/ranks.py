"""The ranks that second moments are kept by unless another is asked for.

Files say of statistics how they were collected; one that says nothing of a rank holds whole
moments, whatever is collected by default.
"""

from typing import Final, Literal

AUTO_RANK = 128  # where a layer is wide enough for its directions to be smaller than its moment
RANK_UNLESS_GIVEN: Final[Literal["auto", "full"]] = "auto"
