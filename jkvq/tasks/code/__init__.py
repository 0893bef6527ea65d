"""Problems whose answers are programs, and where those run."""
