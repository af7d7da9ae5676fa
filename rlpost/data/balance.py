"""Work of different sizes, dealt out evenly."""

from collections.abc import Sequence


def deal(sizes: Sequence[int], num_parts: int) -> list[list[int]]:
    """Indices of `sizes` in `num_parts` parts of about equal sums: the largest first, each to the lightest part.

    The sum of no part is over 4/3 of the best possible largest one (Graham, 1969). Equal sizes go in order, so equal
    inputs give equal parts.
    """
    parts: list[list[int]] = [[] for _ in range(num_parts)]
    loads = [0] * num_parts
    for index in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
        lightest = loads.index(min(loads))
        parts[lightest].append(index)
        loads[lightest] += sizes[index]
    return [sorted(part) for part in parts]


def deal_within(sizes: Sequence[int], limit: int) -> list[list[int]]:
    """The fewest parts that `deal` keeps within `limit` each; what is over the limit by itself stands alone."""
    large = [[i] for i, size in enumerate(sizes) if size > limit]
    small = [i for i, size in enumerate(sizes) if size <= limit]
    if not small:
        return large
    num_parts = -(-sum(sizes[i] for i in small) // limit)
    while True:
        parts = deal([sizes[i] for i in small], num_parts)
        if all(sum(sizes[small[i]] for i in part) <= limit for part in parts):
            return [[small[i] for i in part] for part in parts] + large
        num_parts += 1
