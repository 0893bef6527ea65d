"""Offline calibration of quantized caches. Empty until the first quantized cache lands."""
