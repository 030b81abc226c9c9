"""What a run tells about itself: metrics, the terminal, a trace, a log of each rank."""
