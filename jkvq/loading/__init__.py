"""From a model's name to one that runs: loading, calibration and check, conversion."""
