"""What all other folders use: errors for users, progress bars, memory, atomic folders."""
