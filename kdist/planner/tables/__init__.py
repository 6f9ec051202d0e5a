"""Tables of hardware, prices, and fitted constants, with their readers."""
