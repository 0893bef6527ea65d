"""What jkvq takes where its user names nothing."""

DEFAULT_MODEL = "smollm2-135m"
PLAIN_CACHE = "bf16"  # folds nothing into the weights; what other caches are compared with
# What a model gets when nobody names a cache: the first that it can have.
DEFAULT_CACHES = ("jkvq-int4", "saw-int4,center=true,recent=64,sink=64", PLAIN_CACHE)
CALIBRATION_TOKENS = 8192
