"""What a backend receives and implements, and where backends are found."""
