"""Owner threads that drive sources on a clock, and the totals that their events add up to."""
