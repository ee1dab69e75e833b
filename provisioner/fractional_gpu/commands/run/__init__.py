"""Implements `jupyter gpu run`: starts the program, detects when it needs the GPU, and manages its lease."""
