"""Parts that follow kernels between events: GPU use against the caps, activity of idle kernels, and processes left behind."""
