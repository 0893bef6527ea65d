"""Problems in words, and answers that are numbers and expressions."""
