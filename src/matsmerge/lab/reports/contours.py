"""Lines of one level on a grid of values, by marching squares."""

import math
from collections import defaultdict
from collections.abc import Sequence

Vertex = tuple[float, float]
_Edge = tuple[int, int, int]  # row, column, and 0 to the right or 1 downwards of that corner


def level_lines(
    xs: Sequence[float], ys: Sequence[float], values: Sequence[Sequence[float]], level: float
) -> list[list[Vertex]]:
    """Where values, row by row of `ys`, cross a level; a closed line ends where it begins.

    Along the edges of the grid values are taken to be linear. Squares with a corner that is no
    number are left out.
    """
    places: dict[_Edge, Vertex] = {}
    beside: dict[_Edge, list[_Edge]] = defaultdict(list)
    for i in range(len(ys) - 1):
        for j in range(len(xs) - 1):
            corners = [(i, j), (i, j + 1), (i + 1, j + 1), (i + 1, j)]
            found = [values[a][b] - level for a, b in corners]
            if not all(map(math.isfinite, found)):
                continue
            edges: list[_Edge] = [(i, j, 0), (i, j + 1, 1), (i + 1, j, 0), (i, j, 1)]
            crossed = []
            for k, edge in enumerate(edges):
                here, there = found[k], found[(k + 1) % 4]
                if (here > 0) != (there > 0):
                    (a, b), (c, d) = corners[k], corners[(k + 1) % 4]
                    t = here / (here - there)
                    x, y = xs[b] + t * (xs[d] - xs[b]), ys[a] + t * (ys[c] - ys[a])
                    places[edge] = (x, y)
                    crossed.append(edge)
            # Of a saddle the mean in the middle says which crossings belong together.
            if len(crossed) == 4 and (sum(found) > 0) != (found[0] > 0):
                crossed = [crossed[3], *crossed[:3]]
            for first, second in zip(crossed[::2], crossed[1::2], strict=True):
                beside[first].append(second)
                beside[second].append(first)
    return [[places[edge] for edge in line] for line in _joined(beside)]


def _joined(beside: dict[_Edge, list[_Edge]]) -> list[list[_Edge]]:
    """Chains of neighbours: open ones from their ends, then closed ones."""
    lines = []
    left = {edge: list(others) for edge, others in beside.items()}
    for start in sorted(left, key=lambda edge: len(left[edge])):
        while left[start]:
            line = [start]
            while left[line[-1]]:
                here = line[-1]
                after = left[here].pop()
                left[after].remove(here)
                line.append(after)
            lines.append(line)
    return lines
