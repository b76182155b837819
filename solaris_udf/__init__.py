"""What runs on executors and in online readers. Importing this package imports nothing else."""
