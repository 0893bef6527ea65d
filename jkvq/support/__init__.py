"""What everything else leans on: errors, progress, memory, folders that are written whole."""
