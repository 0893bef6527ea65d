"""Widths by layer, chosen to a target by what each layer's codes cost the next tokens."""
