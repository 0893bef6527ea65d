"""`jkvq compare`: everything about some caches of a model, in one folder."""
