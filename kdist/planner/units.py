"""Hours, seconds and dollars as a person reads them, with three digits however small they are."""


def duration(hours: float) -> str:
    """Hours; minutes or seconds where they are few.

    >>> duration(12.3456), duration(0.25), duration(0.001)
    ('12.3 h', '15 min', '3.6 s')
    """
    for size, unit in ((1.0, "h"), (1 / 60, "min")):
        if hours >= size:
            return f"{_three(hours / size)} {unit}"
    return f"{_three(hours * 3600)} s"


def milliseconds(seconds: float) -> str:
    """Milliseconds; seconds where they are many."""
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1e3:.1f} ms"


def dollars(usd: float) -> str:
    """US dollars, with cents at least.

    >>> dollars(1234.5), dollars(0.00123), dollars(0)
    ('$1,234.50', '$0.00123', '$0.00')
    """
    return f"${usd:,.2f}" if usd >= 1 or usd == 0 else f"${usd:.3g}"


def _three(value):
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
