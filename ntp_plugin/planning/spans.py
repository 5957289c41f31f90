"""Represents sets of whole numbers as runs: ((0, 4), (9, 12)) is {0, 1, 2, 3, 9, 10, 11}.

Layouts contain millions of vocabulary rows and MLP columns, but few runs of them; the cost of everything in planning
grows with the number of runs. If a function says *ordered*, the order of the runs carries meaning (it is the order in
local memory); otherwise runs ascend and do not touch.
"""

from collections.abc import Iterable

type Span = tuple[int, int]
type Spans = tuple[Span, ...]


def size(spans: Spans) -> int:
    """Count the numbers."""
    return sum(stop - start for start, stop in spans)


def joined(spans: Iterable[Span]) -> Spans:
    """Ordered; drop empty runs, and join a run to the one that it continues."""
    result: list[Span] = []
    for start, stop in spans:
        if result and result[-1][1] == start:
            result[-1] = (result[-1][0], stop)
        elif start < stop:
            result.append((start, stop))
    return tuple(result)


def union(*parts: Spans) -> Spans:
    """All numbers of disjoint parts, ascending."""
    return joined(sorted(span for part in parts for span in part))


def intersection(left: Spans, right: Spans) -> Spans:
    """The numbers in both."""
    result: list[Span] = []
    i = j = 0
    while i < len(left) and j < len(right):
        start, stop = max(left[i][0], right[j][0]), min(left[i][1], right[j][1])
        if start < stop:
            result.append((start, stop))
        if left[i][1] <= right[j][1]:
            i += 1
        else:
            j += 1
    return tuple(result)


def difference(left: Spans, right: Spans) -> Spans:
    """The numbers in `left` that are not in `right`."""
    result: list[Span] = []
    j = 0
    for start, stop in left:
        free = start  # from here on, nothing of this run has been taken away yet
        while j < len(right) and right[j][1] <= start:
            j += 1
        for taken_start, taken_stop in right[j:]:
            if taken_start >= stop:
                break
            if free < taken_start:
                result.append((free, taken_start))
            free = taken_stop
        if free < stop:
            result.append((free, stop))
    return tuple(result)


def split_at(spans: Spans, count: int) -> tuple[Spans, Spans]:
    """Ordered; the first `count` numbers (fewer if there are not so many), and the rest."""
    head: list[Span] = []
    for index, (start, stop) in enumerate(spans):
        taken = min(stop - start, count)
        count -= taken
        if taken:
            head.append((start, start + taken))
        if taken < stop - start:
            return tuple(head), ((start + taken, stop), *spans[index + 1 :])
    return tuple(head), ()


def even_sizes(count: int, parts: int) -> list[int]:
    """`count` in `parts` that differ by one at most, the larger ones first."""
    small, larger = divmod(count, parts)
    return [small + (part < larger) for part in range(parts)]


def even_cut(spans: Spans, parts: int) -> list[Spans]:
    """Ordered; the numbers in `parts` runs of even size, the larger ones first."""
    cuts: list[Spans] = []
    for wanted in even_sizes(size(spans), parts):
        cut, spans = split_at(spans, wanted)
        cuts.append(cut)
    return cuts
