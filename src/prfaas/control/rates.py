"""How often everybody is asked: as often as wanted, less often when there are many."""


def period_s(wanted_s: float, members: int, most_per_s: float) -> float:
    """Seconds between two rounds over `members`, so that never more than `most_per_s` are asked in a second."""
    return max(wanted_s, members / most_per_s)
