"""Whose GPU it is: from a process to a job, by pure functions over what sources have read."""
