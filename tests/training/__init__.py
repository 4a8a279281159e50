"""Programs with the derivative inside: both halves of every attention are found and replaced."""
