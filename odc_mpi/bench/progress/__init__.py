"""`odc-mpi bench progress`: reading from and pushing to ranks that compute."""
