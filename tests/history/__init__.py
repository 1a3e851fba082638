"""Hours of Prometheus data from the shipped recording: played in simulated time, back-filled into a real database."""
