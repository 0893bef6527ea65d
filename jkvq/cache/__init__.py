"""The KV cache: what a spec stores, where it lies, and the basis it is stored in."""
