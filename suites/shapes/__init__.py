"""Shapes too small to cut: had as asked or refused loudly, never wrong."""
