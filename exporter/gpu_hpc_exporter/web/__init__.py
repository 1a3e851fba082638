"""The live page and the API behind it."""
