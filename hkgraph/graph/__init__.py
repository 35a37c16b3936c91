"""Graphs of populations: as data, as pictures, and as running programs."""
