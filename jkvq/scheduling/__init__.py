"""Who runs when, and in which pages: plain Python over numbers of pages, without a device."""
