"""Offline calibration of caches; nothing is here yet."""
