"""Quintet: MoE training over five parallel axes. Start at README.md, then models/decoder.py."""
