"""What `benchmarks.failures` runs: cells that lose a process, attach again and again, or are loaded
while clients leave."""
