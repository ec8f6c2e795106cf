"""Self-contained HTML pages of run folders."""
