"""Random programs, written as text, judged by float64: what an adversary would try.  See docs/random-programs.md."""
