"""`jkvq eval`: the commands that measure."""
