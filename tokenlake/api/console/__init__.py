"""The console: pages for people, rendered on the server, over the same SQL views as everything else."""
